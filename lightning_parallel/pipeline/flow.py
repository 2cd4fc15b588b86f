"""What crosses the cuts beside the chain: skip connections, found by watching one step on absent tensors.

The output of the layer before a cut always crosses it. Many models hand more down: an encoder's output that every
decoder layer attends to, a second embedding, a U-Net's skip connections. Which ones is seen from a *survey*: the user's
step is run once with every parameter absent, so each value carries the origins that it was computed from, at no cost
in memory or arithmetic. A module on stage 2 whose inputs come from the output of a module on stage 0 makes that
output cross the cuts 0|1 and 1|2, gradients coming back the same way.

Only outputs of *units* cross: the layers, and the modules outside that hold parameters. What the user's code computes
between them is computed again on each stage that needs it. The end of the step, its loss and its logs, belongs to the
last stage: whatever they were computed from is needed there (a penalty on an early layer's output, a variational
autoencoder's divergence). Every rank surveys by itself, on the same batch; layers out of order are found by all of
them, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_parallel.pipeline.absent import AbsentForward, AbsentTensor, AbsentValueError, absent_like, origin_of
from lightning_parallel.pipeline.kept_state import StateKept
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.random import seeded


@dataclass(frozen=True)
class Cargo:
    """The output of one call of a module.

    Attributes:
        module: its name.
        call: which of the module's calls in a step.
        tensors: how many tensors its output holds.
    """

    module: str
    call: int
    tensors: int


@dataclass(frozen=True)
class Flow:
    """For each cut s | s+1, what crosses it beside the output of the layer before it."""

    cuts: tuple[tuple[Cargo, ...], ...]

    def into(self, stage: int) -> tuple[Cargo, ...]:
        return self.cuts[stage - 1] if stage > 0 else ()

    def out_of(self, stage: int) -> tuple[Cargo, ...]:
        return self.cuts[stage] if stage < len(self.cuts) else ()

    def heaviest(self) -> int:
        """The stage before the cut that carries most tensors beside the chain."""
        return max(range(len(self.cuts)), key=lambda stage: tensors_of(self.cuts[stage]))


def tensors_of(cargo: Iterable[Cargo]) -> int:
    """How many tensors it is."""
    return sum(item.tensors for item in cargo)


def chain_only(partition: Partition) -> Flow:
    """Nothing crosses but the layers' outputs."""
    return Flow(((),) * (partition.stages - 1))


class LayerOrderError(RuntimeError):
    """A layer was called twice, out of order or never, or a stage needs what a later one computes."""


def survey(
    module: nn.Module,
    partition: Partition,
    units: Mapping[str, AbsentForward],
    step: Callable[[], Any],
    logged: Sequence[Any] = (),
) -> Flow:
    """Watch one step. What it returns, and what it leaves on modules, is needed on the last stage, and so is the first
    value that it asks for behind the layers: there a loss has values, and here the look ends.

    Args:
        module: the module whose parts ``step`` calls.
        partition: where they are.
        units: for each layer and each module outside, its absent forward.
        step: the user's step on a real microbatch, with its logs going to ``logged``.
        logged: what the last stage needs too.

    Raises:
        LayerOrderError: nothing to be run as a pipeline.
        Exception: what the step raised before it had called all layers.
    """
    watch = _Watch(partition, units)
    with (
        _everything_absent(module, partition),
        watch.installed(module),
        StateKept(module, apart=map(module.get_submodule, units)) as state,
        seeded(0, torch.device("cpu")),
        torch.no_grad(),
    ):
        try:
            watch.needed_at_the_end(step())
        except LayerOrderError:
            raise
        except AbsentValueError as error:
            if not watch.layers_called:
                raise
            watch.need_at_the_end(error.origins)
        except Exception:  # of a loss that makes no sense of absent values; the last stage will tell if it is another
            if not watch.layers_called:
                raise
        watch.needed_at_the_end((logged, [*state.written()]))
    order_checked(partition, watch.next_layer, None)
    return watch.flow()


def order_checked(partition: Partition, expected: int, called: int | None) -> int:
    """Layer ``called`` (None: the step ended) where layer ``expected`` is due: what is due next, or an error."""
    names = partition.layers
    if called is None and expected < len(names):
        raise LayerOrderError(
            f"Layer '{names[expected]}' was not called by the step. A pipeline's layers run once each, in order: leave "
            f"out those that don't with `layers`."
        )
    if called is not None and called != expected:
        what = "a second time" if called < expected else f"before '{names[expected]}'"
        raise LayerOrderError(
            f"Layer '{names[called]}' was called {what}. A pipeline's layers run once each, in order: name those that "
            f"do with `layers` (now {len(names)} layers, '{names[0]}' to '{names[-1]}')."
        )
    return expected + 1


class _Watch:
    def __init__(self, partition: Partition, units: Mapping[str, AbsentForward]) -> None:
        self.next_layer = 0
        self._partition = partition
        self._units = units
        self._indices = {name: i for i, name in enumerate(partition.layers)}
        self._stages = partition.places()
        self._calls: dict[str, int] = {}
        # By origin: the stage, what it is, and the layer behind which that stage has left the step, if before the call.
        self._produced: dict[str, tuple[int, Cargo, str | None]] = {}
        self._needed: dict[str, int] = {}  # by origin: the last stage that needs it

    @contextmanager
    def installed(self, module: nn.Module) -> Iterator[None]:
        modules = {name: module.get_submodule(name) for name in self._units}
        before = {name: m.__dict__.get("forward") for name, m in modules.items()}
        try:
            for name, m in modules.items():
                m.forward = self._watching(name)  # type: ignore[method-assign]
            yield
        finally:
            for name, m in modules.items():
                if before[name] is None:
                    del m.forward
                else:
                    m.__dict__["forward"] = before[name]

    def _watching(self, name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._called(name, args, kwargs)

        return forward

    def _called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage, call = self._stages[name], self._calls.get(name, 0)
        self._calls[name] = call + 1
        if name in self._indices:
            self.next_layer = order_checked(self._partition, self.next_layer, self._indices[name])
        for leaf in pytree.tree_leaves((args, kwargs)):
            for origin in leaf.origins if isinstance(leaf, AbsentTensor) else ():
                self._need(origin, name, stage)
        output = self._units[name].answer(args, kwargs, call)
        count = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output))
        end = self._partition.bounds[stage + 1]
        gone = name not in self._indices and stage < self._partition.stages - 1 and self.next_layer >= end
        behind = self._partition.layers[end - 1] if gone else None
        self._produced[origin_of(name, call)] = (stage, Cargo(name, call, count), behind)
        return output

    @property
    def layers_called(self) -> bool:
        return self.next_layer == len(self._partition.layers)

    def needed_at_the_end(self, values: Any) -> None:
        """Behind all layers, ``values`` are of use to the user."""
        for leaf in pytree.tree_leaves(values):
            if isinstance(leaf, AbsentTensor):
                self.need_at_the_end(leaf.origins)

    def need_at_the_end(self, origins: Iterable[str]) -> None:
        for origin in origins:
            self._need(origin, "the end of the step", self._partition.stages - 1)

    def _need(self, origin: str, consumer: str, stage: int) -> None:
        if origin not in self._produced:
            return  # a parameter used outside its module; the stages raise where it isn't at hand
        source, cargo, behind = self._produced[origin]
        if behind is not None:
            raise _misplaced(
                f"'{cargo.module}' is on stage {source}, but is called behind '{behind}', where that stage has left "
                f"the step.",
                cargo.module,
                f"behind '{behind}'",
            )
        if source > stage:
            # A layer is where it belongs; then the other one isn't.
            named = (consumer, f"behind '{cargo.module}'")
            raise _misplaced(
                f"'{consumer}' is on stage {stage}, but needs the output of '{cargo.module}' on stage {source}.",
                *((cargo.module, f"before '{consumer}'") if consumer in self._indices else named),
            )
        self._needed[origin] = max(stage, self._needed.get(origin, 0))

    def flow(self) -> Flow:
        cuts: list[list[Cargo]] = [[] for _ in range(self._partition.stages - 1)]
        for origin, consumer in self._needed.items():
            stage, cargo, _ = self._produced[origin]
            for cut in range(stage, consumer):
                # Beyond its own cut a layer's output is cargo like any other.
                if cargo.module != self._partition.layers[self._partition.bounds[cut + 1] - 1]:
                    cuts[cut].append(cargo)
        return Flow(tuple(tuple(cut) for cut in cuts))


def _misplaced(problem: str, module: str, place: str) -> LayerOrderError:
    return LayerOrderError(
        f"{problem} A module outside the layers goes with the first stage if it is registered before them, with the "
        f"last if after, or if `forward` or `training_step` plainly calls it behind them, and with the next layer if "
        f"between: register '{module}' in __init__ where it is called, or name it in `layers` {place}; if it runs "
        f"several times, call it inside the layers' own forwards."
    )


@contextmanager
def _everything_absent(module: nn.Module, partition: Partition) -> Iterator[None]:
    """Parameters and buffers of all units absent; afterwards as they were. Buffers too: a forward may write them."""
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for name in (*partition.layers, *partition.outside):
            for submodule in module.get_submodule(name).modules():
                stores: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
                for store in stores:
                    for key, tensor in store.items():
                        if tensor is not None and not isinstance(tensor, AbsentTensor):
                            kept.append((store, key, tensor))
                            store[key] = absent_like(tensor, f"parameter '{name}.{key}'")
        yield
    finally:
        for store, key, tensor in kept:
            store[key] = tensor
