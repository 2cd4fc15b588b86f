"""What crosses the cuts besides the chain: skip connections, found by watching one step on absent tensors.

The output of the layer before a cut always crosses it. Many models hand on more: an encoder's output that every decoder
layer attends to, a second embedding, a U-Net's skip connections. A *survey* shows which: the user's step is run once
with every parameter absent, so each value carries the origins that it was computed from, and nothing is stored or
computed. If a module on stage 2 gets the output of a module on stage 0, that output crosses the cuts 0|1 and 1|2, and
its gradient comes back the same way::

    stage 0          stage 1          stage 2
    down.0 ----------- cargo --------> up.1
    down.1 --chain--> middle --chain-> up.0

Only outputs of *owned modules* cross. An owned module is a layer, or a module outside the chain that holds parameters.
What the user's code computes between owned modules is computed again on each stage that needs it. The end of the step,
its loss and its logs, belongs to the last stage: whatever they were computed from is needed there (a penalty on an
early layer's output, a variational autoencoder's divergence). Every rank surveys by itself, on the same batch. All of
them find layers that are out of order, before anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.absent import AbsentForward, AbsentTensor, AbsentValueError, absent_like, origin_of
from lightning_parallel.pipeline.kept_state import StateKept
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.seeding import TorchGenerators
from lightning_parallel.torch_private import buffers_of, parameters_of, tree_leaves

Call = tuple[str, int]  # of an owned module: its name, and which of its calls in a step


@dataclass(frozen=True)
class Cargo:
    """The output of one call of an owned module, which crosses a cut besides the chain.

    Attributes:
        module: the owned module's name.
        call: which of its calls in a step.
        tensors: the number of tensors in its output.
    """

    module: str
    call: int
    tensors: int


@dataclass(frozen=True)
class Flow:
    """What crosses each cut s | s+1 besides the output of the layer before it.

    Attributes:
        cuts: the cargo of each cut.
    """

    cuts: tuple[tuple[Cargo, ...], ...]

    def into(self, stage: int) -> tuple[Cargo, ...]:
        return self.cuts[stage - 1] if stage > 0 else ()

    def out_of(self, stage: int) -> tuple[Cargo, ...]:
        return self.cuts[stage] if stage < len(self.cuts) else ()

    def heaviest(self) -> int:
        """The stage before the cut that most tensors cross besides the chain."""
        return max(range(len(self.cuts)), key=lambda stage: tensors_of(self.cuts[stage]))


def tensors_of(cargo: Iterable[Cargo]) -> int:
    """The number of its tensors."""
    return sum(item.tensors for item in cargo)


def chain_only(partition: Partition) -> Flow:
    """Nothing crosses but the layers' outputs."""
    return Flow(((),) * (partition.stages - 1))


class LayerOrderError(RuntimeError):
    """A layer was called twice, out of order or never, or a stage needs what a later one computes."""


def check_order(partition: Partition, expected: int, called: int | None) -> None:
    """Refuse the call of a layer that isn't due.

    Args:
        partition: gives the layers' order.
        expected: the index of the layer that is due.
        called: the index of the layer that is called; None if the step has ended.

    Raises:
        LayerOrderError: it names the layers, and the fix.
    """
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


def survey(
    module: nn.Module,
    partition: Partition,
    owned_modules: Mapping[str, AbsentForward],
    step: Callable[[], Any],
    logged: Sequence[Any] = (),
) -> Flow:
    """Watch one step. What it returns, and what it leaves on modules, is needed on the last stage. So is the first
    value that it asks for after the layers: a loss has values there. Here the survey ends at it.

    Args:
        module: the module whose parts ``step`` calls.
        partition: who owns what.
        owned_modules: the absent answers of all owned modules, by name. A later call finds here what was asked now.
        step: the user's step, bound to a batch.
        logged: what ``step`` has logged by its end.

    Raises:
        LayerOrderError: layers were called twice, out of order or never, or something is needed on a stage before the
            one that computes it.
        AbsentValueError: the code before or between the layers asks for values that only one stage has.
    """
    watch = _Watch(partition, owned_modules)
    with (
        _everything_absent(module, partition),
        watch.installed(module),
        StateKept(module, apart=map(module.get_submodule, owned_modules)) as state,
        TorchGenerators(torch.device("cpu")).seeded(0),
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
        except Exception:  # perhaps a loss can't work on absent values; the last stage raises any real error
            if not watch.layers_called:
                raise
        watch.needed_at_the_end((logged, [*state.written()]))
    check_order(partition, watch.next_layer, None)
    return watch.flow()


@dataclass(frozen=True)
class _Produced:
    """Where an origin comes from.

    Attributes:
        stage: that computes it.
        cargo: what it is.
        after: the layer after which that stage has left the step, if before the call.
    """

    stage: int
    cargo: Cargo
    after: str | None


class _Watch:
    """Stands in for the forwards of all owned modules, and notes which output is needed where."""

    def __init__(self, partition: Partition, owned_modules: Mapping[str, AbsentForward]) -> None:
        self.next_layer = 0
        self._partition = partition
        self._owned_modules = owned_modules
        self._indices = {name: i for i, name in enumerate(partition.layers)}
        self._stages = partition.stage_of_modules()
        self._calls: dict[str, int] = {}
        self._produced: dict[str, _Produced] = {}  # by origin
        self._needed: dict[str, int] = {}  # by origin: the last stage that needs it

    @contextmanager
    def installed(self, module: nn.Module) -> Iterator[None]:
        modules = {name: module.get_submodule(name) for name in self._owned_modules}
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
            check_order(self._partition, self.next_layer, self._indices[name])
            self.next_layer += 1
        for leaf in tree_leaves((args, kwargs)):
            for origin in leaf.origins if isinstance(leaf, AbsentTensor) else ():
                self._need(origin, name, stage)
        output = self._owned_modules[name].answer(args, kwargs, call)
        count = sum(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
        end = self._partition.bounds[stage + 1]
        gone = name not in self._indices and stage < self._partition.stages - 1 and self.next_layer >= end
        after = self._partition.layers[end - 1] if gone else None
        self._produced[origin_of(name, call)] = _Produced(stage, Cargo(name, call, count), after)
        return output

    @property
    def layers_called(self) -> bool:
        return self.next_layer == len(self._partition.layers)

    def needed_at_the_end(self, values: Any) -> None:
        """``values`` are of use to the user when the step has ended."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, AbsentTensor):
                self.need_at_the_end(leaf.origins)

    def need_at_the_end(self, origins: Iterable[str]) -> None:
        for origin in origins:
            self._need(origin, "the end of the step", self._partition.stages - 1)

    def _need(self, origin: str, consumer: str, stage: int) -> None:
        if origin not in self._produced:
            return  # a parameter used outside its module; stages on which it isn't raise
        produced = self._produced[origin]
        cargo = produced.cargo
        if produced.after is not None:
            raise _misplaced(
                f"'{cargo.module}' is on stage {produced.stage}, but is called after '{produced.after}', where that "
                f"stage has left the step.",
                cargo.module,
                f"after '{produced.after}'",
            )
        if produced.stage > stage:
            # A layer is where it belongs; then the other one isn't.
            named = (consumer, f"after '{cargo.module}'")
            raise _misplaced(
                f"'{consumer}' is on stage {stage}, but needs the output of '{cargo.module}' on stage "
                f"{produced.stage}.",
                *((cargo.module, f"before '{consumer}'") if consumer in self._indices else named),
            )
        self._needed[origin] = max(stage, self._needed.get(origin, 0))

    def flow(self) -> Flow:
        cuts: list[list[Cargo]] = [[] for _ in range(self._partition.stages - 1)]
        for origin, consumer in self._needed.items():
            produced = self._produced[origin]
            for cut in range(produced.stage, consumer):
                # Beyond its own cut a layer's output is cargo like any other.
                if produced.cargo.module != self._partition.layers[self._partition.bounds[cut + 1] - 1]:
                    cuts[cut].append(produced.cargo)
        return Flow(tuple(tuple(cut) for cut in cuts))


def _misplaced(problem: str, module: str, place: str) -> LayerOrderError:
    return LayerOrderError(
        f"{problem} A module outside the layers goes with the first stage if it is registered before them, with the "
        f"last if it is registered after them or `forward` or `training_step` plainly calls it after them, and with "
        f"the next layer if it is registered between: register '{module}' in __init__ where it is called, or name it "
        f"in `layers` {place}. If it runs several times, call it inside the layers' own forwards."
    )


@contextmanager
def _everything_absent(module: nn.Module, partition: Partition) -> Iterator[None]:
    """Inside, the parameters and buffers of all owned modules are absent. Buffers too, since a forward may write to
    them."""
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for name in (*partition.layers, *partition.outside):
            for submodule in module.get_submodule(name).modules():
                stores: tuple[dict[str, Any], ...] = (parameters_of(submodule), buffers_of(submodule))
                for store in stores:
                    for key, tensor in store.items():
                        if tensor is not None and not isinstance(tensor, AbsentTensor):
                            kept.append((store, key, tensor))
                            store[key] = absent_like(tensor, f"parameter '{name}.{key}'")
        yield
    finally:
        for store, key, tensor in kept:
            store[key] = tensor
