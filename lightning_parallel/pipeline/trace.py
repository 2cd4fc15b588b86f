"""What a step does, seen by running it once on absent tensors: which modules it calls, and what each needs of others.

Parameters are absent, so next to nothing is stored or computed (``absent_forward.py`` has the exceptions). Every value
carries its *origins*, what it was computed from. Some modules are taken as a whole: a call of such a *unit* is noted,
with the origins of its inputs. The code around the units runs as it stands::

    step                            the trace
    h = self.embed(ids)             embed      needs nothing
    h = self.block(h)               block      needs the output of 'embed'
    p = self.embed.weight.norm()
    return loss(h) + p              the end    needs the output of 'block', parameter 'embed.weight'

``partition.py`` decides by this who runs what, and ``flow.py`` what crosses the cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry

from lightning_parallel.pipeline.absent import (
    AbsentTensor,
    AbsentValueError,
    absent_like,
    origin_of,
    origin_of_parameter,
)
from lightning_parallel.pipeline.absent_forward import ContainerWrittenError, asked, is_scripted
from lightning_parallel.pipeline.interception import Interception
from lightning_parallel.pipeline.kept_state import StateKept
from lightning_parallel.pipeline.seeding import (
    TorchGenerators,
    host_generators_kept,
    host_generators_state,
    seed_host_generators,
)
from lightning_parallel.pipeline.timing import nanoseconds_of
from lightning_parallel.torch_private import (
    TorchDispatchMode,
    buffers_of,
    parameters_of,
    tree_leaves,
    tree_map,
)

Call = tuple[str, int]  # of a module: its name, and which of its calls in a step


@dataclass(frozen=True)
class TracedCall:
    """A call of a unit.

    Attributes:
        unit: the unit's name.
        call: which of its calls in the step, from 0.
        needs: the origins of its inputs, and of the parameters of other modules that it reads.
        tensors: the number of tensors in its output.
        nbytes: their size in bytes.
        operations: the floating-point operations of its forward: those of matrix products and convolutions.
        nanoseconds: the time that its forward and backward take; 0 if that wasn't asked for.
        inside: the modules that its own code calls, by name.
        plain: the numbers and texts in its output, and the shapes of the tensors.
        draws_on_host: it draws from Python's or NumPy's generator.
        direct: it was called by its method ``forward``, past its hooks.
        detached: it ran under ``torch.no_grad()``, in a step that didn't.
    """

    unit: str
    call: int
    needs: frozenset[str]
    tensors: int
    nbytes: int
    operations: int
    nanoseconds: int
    inside: frozenset[str]
    plain: tuple[Any, ...]
    draws_on_host: bool
    direct: bool
    detached: bool

    @property
    def origin(self) -> str:
        return origin_of(self.unit, self.call)


@dataclass(frozen=True)
class Escape:
    """A value that was computed inside a unit's call, and can be had from outside, by a hook or an attribute.

    Attributes:
        within: the index of the unit's call in the trace.
        module: whose output it is, or whose own code computed it: the unit, or a module inside. And which of its calls.
        tensors: the number of tensors in that output; None for a value of the module's own code.
        needs: the origins of that module's inputs.
    """

    within: int
    module: Call
    tensors: int | None
    needs: frozenset[str]


@dataclass(frozen=True)
class Trace:
    """What was seen.

    Attributes:
        calls: of units, in order.
        end: the origins of what the step returned, logged and left on modules. If it asked for a value, which ended it,
            that value's origins too.
        escapes: by origin.
        writes: the indices of the calls that change an input in place, by the origin that it has afterwards.
        overwriting: the indices of calls that change in place what isn't absent: a tensor of the batch.
        stopped: the error that ended the step early; None if it came to its end.
        kept: after which of the calls in question the step's own code had left something on modules that it computed
            from what units return; None among them: at the end.
    """

    calls: tuple[TracedCall, ...]
    end: frozenset[str]
    escapes: dict[str, Escape]
    writes: dict[str, int]
    overwriting: frozenset[int]
    stopped: Exception | None
    kept: frozenset[Call | None]

    def position(self) -> dict[str, int]:
        """The index of each call, by the origin of its output."""
        return {call.origin: i for i, call in enumerate(self.calls)}


def trace(
    module: nn.Module,
    is_unit: Callable[[str], bool],
    step: Callable[[], Any],
    *,
    names: dict[int, str] | None = None,
    logged: Sequence[Any] = (),
    seed: int = 0,
    leaving: Container[Call] = (),
    after: Sequence[Call | None] = (),
    timed_on: torch.device | None = None,
) -> Trace:
    """Watch one step. If an error ends it, the trace tells what was called before: perhaps the rest works on
    values only.

    Args:
        module: the module whose parts ``step`` calls.
        is_unit: tells by name whether a called module is taken as a whole.
        step: the user's step, bound to a batch.
        names: of the module's parts, by their ids; by default the first name of each.
        logged: a list in which ``step`` leaves what it logs.
        seed: of the random numbers that the step draws meanwhile.
        leaving: the calls in question for :attr:`Trace.kept`.
        after: if there is one, watch the second of two steps, of which the first ends after this call; None: at its
            end. What it has left on modules has the origin :data:`LEFT`.
        timed_on: where to measure how long calls take; None to measure nothing.
    """
    names = names or names_of(module)
    watch = _Watch(is_unit, names, timed_on)
    parts = [part for part in module.modules() if part is not module]
    units = [part for part in parts if is_unit(names[id(part)])]
    stopped: Exception | None = None
    with (
        everything_absent(module, units),
        StateKept(module, apart=units) as state,
        TorchGenerators(torch.device("cpu")).seeded(seed),
        host_generators_kept(),
        torch.compiler.set_stance("force_eager"),
    ):
        seed_host_generators(seed)
        for call in after:
            first = _Watch(is_unit, names, None, until=call)
            with first.installed(parts), suppress(Exception, _Left):  # any: the look at one step has told it
                step()
            for left in state.written():
                left.origins = frozenset([LEFT])
        watch.look_after(leaving, state)
        with watch.installed(parts):
            try:
                watch.end |= origins_in(step())
            except ContainerWrittenError:
                raise  # wherever it is, some stage would miss what is written
            except AbsentValueError as error:
                stopped = error
                watch.end |= error.origins
            except Exception as error:  # any: it is the step's, and whoever asked for the trace decides what it means
                stopped = error
            left_there = [*state.written()]
            watch.end |= origins_in((logged, left_there))
            watch.kept.update([None] if left_there else [])
    return Trace(
        tuple(watch.calls),
        frozenset(watch.end),
        watch.escapes,
        watch.writes,
        frozenset(watch.overwriting),
        stopped,
        frozenset(watch.kept),
    )


LEFT = "what an earlier step has left on a module"  # an origin


def names_of(module: nn.Module) -> dict[int, str]:
    """The first name of each part, by its id."""
    return {id(part): name for name, part in module.named_modules()}


def origins_in(values: Any) -> frozenset[str]:
    """What the absent tensors in a nested structure were computed from."""
    return frozenset().union(*(leaf.origins for leaf in tree_leaves(values) if isinstance(leaf, AbsentTensor)))


_PARAMETER = origin_of_parameter("").removesuffix("'")  # how the origin of any parameter begins


class _Left(BaseException):
    """A step ends as a stage leaves it: past the user's `except Exception`."""


class _Watch:
    """Stands in for the forwards of a module's parts while a step runs."""

    def __init__(
        self,
        is_unit: Callable[[str], bool],
        names: dict[int, str],
        timed_on: torch.device | None,
        until: Call | None = None,
    ) -> None:
        self.calls: list[TracedCall] = []
        self.end: set[str] = set()
        self.escapes: dict[str, Escape] = {}
        self.writes: dict[str, int] = {}
        self.overwriting: set[int] = set()
        self.kept: set[Call | None] = set()
        self._leaving: Container[Call] = ()
        self._state: StateKept | None = None
        self._until = until
        self._is_unit = is_unit
        self._names = names
        self._timed_on = timed_on
        self._count: Counter[str] = Counter()
        self._announced: Counter[int] = Counter()  # by id: calls whose forward is yet to come
        self._with_gradients = torch.is_grad_enabled()
        self._depth = 0  # of modules inside a unit
        self._inside: set[str] = set()  # modules that the unit under way has called
        self._read: set[str] = set()  # origins of what it and these returned, before it is theirs

    @contextmanager
    def installed(self, parts: Iterable[nn.Module]) -> Iterator[None]:
        watched = Interception()
        announced = register_module_forward_pre_hook(self._announce)
        try:
            for part in parts:
                if not is_scripted(part) and type(part).forward is not nn.Module.forward:
                    watched.instead(part, partial(self._called, part, part.forward))
            yield
        finally:
            announced.remove()
            watched.remove()

    def look_after(self, calls: Container[Call], state: StateKept) -> None:
        """After each of these calls, look at what the step has left on modules."""
        self._leaving, self._state = calls, state

    def _announce(self, part: nn.Module, args: Any) -> None:
        self._announced[id(part)] += 1

    def _called(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        direct = self._announced[id(part)] == 0
        self._announced[id(part)] -= not direct
        name = self._names[id(part)]
        if self._depth > 0:
            return self._called_inside(part, name, forward, args, kwargs)
        if not self._is_unit(name):
            return forward(*args, **kwargs)
        needs = origins_in((args, kwargs))
        call = self._next(name)
        self._inside, self._read = set(), set()
        host = host_generators_state()
        detached = self._with_gradients and not torch.is_grad_enabled()
        with _OperationsCounted() as counted, torch.no_grad():
            output = self._asked(part, forward, args, kwargs, (name, call))
        self._read |= origins_in(output)
        # A unit may read another one's parameters, which it was given as a module.
        own = origins_in(list(part.parameters()))
        needs |= {origin for origin in self._read - own if origin.startswith(_PARAMETER)}
        output = relabelled(output, origin_of(name, call))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.calls.append(
            TracedCall(
                name,
                call,
                needs,
                len(tensors),
                sum(t.numel() * t.dtype.itemsize for t in tensors),
                counted.operations,
                self._time(part, forward, args, kwargs),
                frozenset(self._inside),
                _plain_parts(output),
                host_generators_state() != host,
                direct,
                detached,
            )
        )
        if (name, call) in self._leaving and self._state is not None and any(True for _ in self._state.written()):
            self.kept.add((name, call))
        if (name, call) == self._until:
            raise _Left
        return output

    def _called_inside(
        self, part: nn.Module, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._depth == 1:
            self._inside.add(name)
        if not origins_in((args, kwargs)) and not any(isinstance(p, AbsentTensor) for p in part.parameters()):
            return forward(*args, **kwargs)  # on stand-ins, or on shapes alone
        call = self._next(name)
        output = self._asked(part, forward, args, kwargs, (name, call))
        self._read |= origins_in(output)
        count = sum(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
        origin = origin_of(name, call)
        self.escapes[origin] = Escape(len(self.calls), (name, call), count, origins_in((args, kwargs)))
        return relabelled(output, origin)

    def _asked(
        self, part: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> Any:
        inside = inside_of(*call)
        self.escapes[inside] = Escape(len(self.calls), call, None, origins_in((args, kwargs)))
        is_unit = self._depth == 0
        written = partial(self._written, call) if is_unit else None
        self._depth += 1
        try:
            return asked(part, forward, args, kwargs, inside, written, strict=is_unit)
        finally:
            self._depth -= 1

    def _written(self, call: Call, tensor: Tensor) -> None:
        """A unit's call has changed a tensor of the code around it in place. Later stages have it as it was before."""
        if isinstance(tensor, AbsentTensor):
            origin = f"what '{call[0]}' (call {call[1] + 1}) has changed in place"
            tensor.origins = frozenset([origin])
            self.writes[origin] = len(self.calls)
        else:
            self.overwriting.add(len(self.calls))

    def _time(self, part: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if self._timed_on is None:
            return 0
        self._depth += 1
        try:
            return nanoseconds_of(part, forward, args, kwargs, self._timed_on)
        finally:
            self._depth -= 1

    def _next(self, name: str) -> int:
        self._count[name] += 1
        return self._count[name] - 1


def inside_of(module: str, call: int) -> str:
    """How a value that a module's own code computes from its inputs is named, as an origin."""
    return f"a value inside '{module}'" + (f" (call {call + 1})" if call else "")


def relabelled(output: Any, origin: str) -> Any:
    """The output with absent tensors of this origin in the place of all tensors."""
    origins = frozenset([origin])
    return tree_map(lambda x: AbsentTensor(x, x.device, origins) if isinstance(x, Tensor) else x, output)


def _plain_parts(output: Any) -> tuple[Any, ...]:
    leaves = tree_leaves(output)
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
        if isinstance(leaf, (Tensor, int, float, str))
    )


class _OperationsCounted(TorchDispatchMode):
    """Counts the floating-point operations of what runs inside, by torch's formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **(kwargs or {}), out_val=output)
        return output


@contextmanager
def everything_absent(module: nn.Module, units: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, all parameters are absent, and the buffers of units: their forwards may write to them."""
    in_units = {id(part) for unit in units for part in unit.modules()}
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[int, AbsentTensor] = {}  # a parameter with two names is one tensor
    try:
        for prefix, part in module.named_modules():
            stores: list[dict[str, Any]] = [parameters_of(part)]
            if id(part) in in_units:
                stores.append(buffers_of(part))
            for store in stores:
                for name, tensor in store.items():
                    if tensor is None or isinstance(tensor, AbsentTensor):
                        continue
                    kept.append((store, name, tensor))
                    if id(tensor) not in made:
                        made[id(tensor)] = absent_like(
                            tensor, origin_of_parameter(f"{prefix}.{name}" if prefix else name)
                        )
                    store[name] = made[id(tensor)]
        yield
    finally:
        for store, name, tensor in kept:
            store[name] = tensor
