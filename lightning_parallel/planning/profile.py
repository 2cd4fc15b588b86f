"""What each chunk of a cut module takes, by the number of samples of a microbatch.

A step is traced on two numbers of samples, on tensors without values. Each kind of call in it is tried once for each
(``layer_costs.py``), and what lies between is on a line. The code around the layers, such as the loss, isn't tried: its
results are counted, and it takes as long as these need to be written and read. It belongs to the call before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_parallel.absent.tensor import AbsentMemory, AbsentTensor, AbsentValueError
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.interception import Interception
from lightning_parallel.planning.devices import Device, as_one_of
from lightning_parallel.planning.layer_costs import Cost, kind_of, tried, with_own_objects
from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch import FakeTensorMode, tensors_in
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.operations import OperationsNoted
from lightning_parallel.tracing.trace import Call, TracedCall


@dataclass(frozen=True)
class ChunkCost:
    """Of one microbatch.

    Attributes:
        forward, backward: seconds.
        first: the part of the backward that is in its first half.
        held: bytes from its forward to its backward.
        between: bytes between the halves of its backward.
        forwards, backwards: bytes of it at the fullest moment of its forward, or of its backward.
        sent: bytes that cross the cut after it, as far as its last layer returns them.
        messages: seconds of the forward and the backward in which its tensor ranks exchange sums.
    """

    forward: float
    backward: float
    first: float
    held: int
    between: int
    forwards: int
    backwards: int
    sent: int
    messages: float = 0.0


@dataclass(frozen=True)
class _Look:
    """A step on some samples: its calls, what they were given, and the operations and bytes of the code after each."""

    samples: int
    calls: Sequence[TracedCall]
    given: Mapping[Call, tuple[Any, Any]]
    around: Sequence[tuple[int, int]]


class _Around(OperationsNoted):
    """Counts what the code around the units computes, by the number of calls so far. That before the first call counts
    as if it came after it. What a unit is given isn't counted here: it is an input of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.given: dict[Call, tuple[Any, Any]] = {}
        self.found = [(0, 0)]
        self._made: dict[AbsentMemory, int] = {}  # bytes

    def before(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        self.inside = True
        number = sum(1 for other, _ in self.given if other == name)
        self.given[name, number] = with_own_objects((args, kwargs))
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, AbsentTensor):
                self._add(0, -self._made.pop(tensor.memory, 0))

    def after(self, unit: nn.Module, args: Any, output: Any) -> None:
        self.inside = False
        if len(self.given) > 1:
            self.found.append((0, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        self.flops = self.nbytes = 0
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self._add(self.flops, self.nbytes)
        if isinstance(output, AbsentTensor) and self.nbytes:
            self._made[output.memory] = self.nbytes
        return output

    def _add(self, operations: int, nbytes: int) -> None:
        before = self.found[-1]
        self.found[-1] = before[0] + operations, max(0, before[1] + nbytes)


class Profile:
    """What the calls of a module's step take on a device.

    Args:
        step_of: gives the step on about so many samples, and their true number.
        sizes: the least number of samples to look at, and the most.
        device: the rates of the device.
        tried_on: where layers are tried.
        context: the precision's.
        ranks: their number, where they share this machine's cores.
        group: the tensor ranks among which the module is divided; None if it is whole.

    Attributes:
        untried: units that can't be run on stand-ins: their costs come of their operations and results.
    """

    def __init__(
        self,
        module: nn.Module,
        step_of: Callable[[int], tuple[Callable[[], Any], int]],
        sizes: tuple[int, int],
        device: Device,
        tried_on: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        ranks: int,
        group: GroupOnPaper | None = None,
    ) -> None:
        self._group = GroupOnPaper(1) if group is None else group
        self.untried: set[str] = set()
        self._module, self._step_of, self._sizes = module, step_of, sizes
        self._device, self._tried_on, self._context, self._ranks = device, tried_on, context, ranks
        self._looks: dict[frozenset[str], list[_Look]] = {}
        self._costs: dict[Any, Cost | None] = {}
        self._found: dict[Any, list[tuple[TracedCall, Cost]]] = {}  # by units and samples

    def chunks(self, parts: Partition, samples: int, *, recompute: bool = False) -> list[ChunkCost]:
        """What each chunk takes for a microbatch of so many samples. With ``recompute``, of layers only the inputs are
        held, and they run again in the backward."""
        items: list[list[tuple[TracedCall, Cost]]] = [[] for _ in parts.placement]
        for call, cost in self.calls(parts, samples):
            items[parts.calls[call.unit, call.call]].append((call, cost))
        again = set(parts.layers) if recompute else set()
        return [_chunk(own, again) for own in items]

    def seconds(self, parts: Partition, samples: int) -> list[float]:
        """The seconds of each call in the chain of layers, forward and backward, with the calls that go with it."""
        costs = {(call.unit, call.call): cost for call, cost in self.calls(parts, samples)}
        found, waiting = [], 0.0
        for call in parts.calls:  # in the order in which they are shared out
            waiting += costs[call].forward + costs[call].backward
            if call[0] in parts.layers:
                found.append(waiting)
                waiting = 0.0
        return [*found[:-1], found[-1] + waiting]

    def calls(self, parts: Partition, samples: int) -> list[tuple[TracedCall, Cost]]:
        """Each call of the step with what it takes."""
        key = frozenset(parts.units), samples
        if key not in self._found:
            self._found[key] = self._mixed(frozenset(parts.units), samples)
        return [(call, cost) for call, cost in self._found[key] if (call.unit, call.call) in parts.calls]

    def _mixed(self, units: frozenset[str], samples: int) -> list[tuple[TracedCall, Cost]]:
        if units not in self._looks:
            few, many = self._sizes
            looks = [self._look(units, many)]
            with suppress(ValueError):  # some layers, such as BatchNorm, refuse one sample
                fewer = self._look(units, few)
                same_calls = [call.origin for call in fewer.calls] == [call.origin for call in looks[0].calls]
                if same_calls and fewer.samples < looks[0].samples:
                    looks.insert(0, fewer)
            self._looks[units] = looks
        looks = self._looks[units]
        weights = [samples / looks[0].samples]
        if len(looks) > 1:
            part = (samples - looks[0].samples) / (looks[1].samples - looks[0].samples)
            weights = [1 - part, part]
        costs = [[self._cost(look, index) for index in range(len(look.calls))] for look in looks]
        # On fewer samples than were tried, a line through two times would make their differences larger.
        share = min(1.0, samples / looks[0].samples)
        return [
            (call, Cost.mixed(each, weights).at_least(share, each[0]))
            for call, *each in zip(looks[0].calls, *costs, strict=True)
        ]

    def _look(self, units: frozenset[str], size: int) -> _Look:
        step, samples = self._step_of(size)
        parts = {id(self._module.get_submodule(name)): name for name in units}
        around, watched = _Around(), Interception()
        for name in units:
            unit = self._module.get_submodule(name)
            watched.before(unit, partial(around.before, name))
            watched.after(unit, around.after, first=True)

        def run() -> Any:
            with around:
                return step()

        try:
            seen = trace(self._module, parts, run)
        finally:
            watched.remove()
        if seen.stopped is not None and not isinstance(seen.stopped, AbsentValueError):
            raise ValueError(f"The step can't be traced: {type(seen.stopped).__name__}: {seen.stopped}")
        return _Look(samples, seen.calls, around.given, around.found)

    def _cost(self, look: _Look, index: int) -> Cost:
        call = look.calls[index]
        given = look.given.get((call.unit, call.call))
        cost = None
        if given is not None:
            unit = self._module.get_submodule(call.unit)
            key = kind_of(unit, *given)
            if key not in self._costs:
                self._costs[key] = self._tried(unit, *given)
            cost = self._costs[key]
        seconds = self._device.computes(call.operations, call.computed)
        if cost is None:
            self.untried.add(call.unit)
            cost = Cost(seconds, 2 * seconds, seconds, inner=call.computed, backwards=call.computed)
        elif not self._device.measured:
            cost = replace(cost, forward=seconds, backward=2 * seconds, first=seconds)
        operations, nbytes = look.around[index] if index < len(look.around) else (0, 0)
        more = self._device.computes(operations, nbytes)
        return replace(
            cost,
            forward=cost.forward + more,
            backward=cost.backward + 2 * more,
            first=cost.first + 2 * more,
            around=nbytes,
            computed=call.computed + nbytes,
            returned=call.returned,
        )

    def _tried(self, unit: nn.Module, args: Any, kwargs: Any) -> Cost | None:
        """What a unit takes; None if it can't be run on stand-ins."""
        call = unit, args, kwargs, self._tried_on, self._context, self._group, self._device
        if not self._device.measured:
            with suppress(Exception), FakeTensorMode():  # any: of the user's layer, which may read values
                return tried(*call, on_paper=True)
        try:
            with as_one_of(self._ranks if self._device.measured else 1, self._tried_on):
                return tried(*call)
        except Exception:  # any: of the user's layer, which may need other values than random ones
            return None


def _chunk(items: Sequence[tuple[TracedCall, Cost]], again: Collection[str]) -> ChunkCost:
    """The calls of a chunk together. Layers in ``again`` run again in the backward. What is held as an input isn't
    counted once more as an output, or as the input of another call."""
    taken = {need for call, cost in items if cost.inputs for need in call.needs}
    inputs: dict[frozenset[str], float] = {}
    held = saved = most_forward = most_backward = 0.0
    for call, cost in items:
        inner = cost.inner + (0.0 if call.origin in taken else cost.outputs)
        saved += inner + cost.around
        held += cost.around + (0.0 if call.unit in again else inner)
        # The inputs of a layer that runs again are outputs of others: about as large as its own.
        own = cost.inputs or (cost.returned if call.unit in again else 0.0)
        inputs[call.needs] = max(inputs.get(call.needs, 0.0), own)
        there = held + sum(inputs.values()) + cost.returned + (inner if call.unit in again else 0.0)
        most_forward = max(most_forward, there + cost.forwards)
        # The code around it has the gradients of its results, and of what these are made of.
        most_backward = max(most_backward, there + cost.backwards, there + 2 * cost.around)
    forward = backward = first = messages = 0.0
    for call, cost in items:
        forwards = cost.forward + cost.sent_forward
        backwards = cost.backward + cost.sent_backward + forwards * (call.unit in again)
        forward += forwards
        backward += backwards
        # Layers that run again have a backward in one piece. What tensor ranks sum is an input's gradient.
        first += backwards if call.unit in again else cost.first + cost.sent_backward
        messages += (1 + (call.unit in again)) * cost.sent_forward + cost.sent_backward
    return ChunkCost(
        forward=max(1e-9, forward),
        backward=max(1e-9, backward),
        first=min(1.0, first / backward) if backward else 1.0,
        held=round(held + sum(inputs.values())),
        between=round(saved + sum(inputs.values())),
        forwards=round(most_forward),
        backwards=round(most_backward),
        sent=round(items[-1][1].returned) if items else 0,
        messages=messages,
    )
