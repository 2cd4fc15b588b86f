"""What each chunk of a cut module takes, by the number of samples of a microbatch.

A step is traced on two numbers of samples, on tensors without values. Each kind of call in it is tried once for each
(``layer_costs.py``), and what lies between is on a line. The code around the layers, such as the loss, isn't tried: its
results are counted, and it takes as long as these need to be written and read. It belongs to the call before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor, AbsentValueError
from lightning_parallel.costs.code_around import CodeAround
from lightning_parallel.costs.devices import Device, as_one_of
from lightning_parallel.costs.layer_costs import Cost, kind_of, tried
from lightning_parallel.cuts.flow import way_of
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.interception import Interception
from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch import FakeTensorMode, tree_leaves
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.ranks.local_model import memory_of
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.trace import TracedCall


@dataclass(frozen=True)
class ChunkCost:
    """Of one microbatch.

    Attributes:
        forward, backward: seconds.
        first: the part of the backward that is in its first half.
        held: bytes from its forward to its backward, and between the halves of that.
        forward_peak, backward_peak: bytes of it at the fullest moment of its forward, or of its backward.
        sent: bytes that cross the cut after it.
        stays: bytes that stay on its stage for later chunks of it; and ``awaited``, that stayed there for this one.
        messages: seconds of the forward and the backward in which its tensor ranks exchange sums.
    """

    forward: float
    backward: float
    first: float
    held: int
    forward_peak: int
    backward_peak: int
    sent: int = 0
    stays: int = 0
    awaited: int = 0
    messages: float = 0.0


@dataclass(frozen=True)
class _Look:
    """A step on some samples: its calls, and the code around them, with what it has found."""

    samples: int
    calls: Sequence[TracedCall]
    code: CodeAround
    around: Sequence[tuple[int, int, int, int]]


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
        self._on_looks: dict[frozenset[str], list[list[Cost]]] = {}  # of the calls of each look
        self._costs: dict[Any, Cost | None] = {}
        self._found: dict[Any, list[tuple[TracedCall, Cost]]] = {}  # by units and samples

    def chunks(self, parts: Partition, samples: int, *, recompute: bool = False) -> list[ChunkCost]:
        """What each chunk takes for a microbatch of so many samples. With ``recompute``, of layers only the inputs are
        held, and they run again in the backward."""
        items: list[list[tuple[TracedCall, Cost]]] = [[] for _ in parts.placement]
        for call, cost in self.calls(parts, samples):
            items[parts.calls[call.unit, call.call]].append((call, cost))
        again = set(parts.layers) if recompute else set()
        code = self._looks[frozenset(parts.units)][0].code
        return _with_messages([_chunk(own, again, code) for own in items], items, parts.placement)

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
            self._on_looks[units] = [[self._cost(look, index) for index in range(len(look.calls))] for look in looks]
        looks = self._looks[units]
        weights = [samples / looks[0].samples]
        if len(looks) > 1:
            part = (samples - looks[0].samples) / (looks[1].samples - looks[0].samples)
            weights = [1 - part, part]
        # On fewer samples than were tried, a line through two times would make their differences larger.
        share = min(1.0, samples / looks[0].samples)
        return [
            (call, Cost.mixed(each, weights).at_least(share, each[0]))
            for call, *each in zip(looks[0].calls, *self._on_looks[units], strict=True)
        ]

    def _look(self, units: frozenset[str], size: int) -> _Look:
        step, samples = self._step_of(size)
        parts = {id(self._module.get_submodule(name)): name for name in units}
        around, watched = CodeAround(), Interception()
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
        return _Look(samples, seen.calls, around, around.found())

    def _cost(self, look: _Look, index: int) -> Cost:
        call = look.calls[index]
        given = look.code.given.get((call.unit, call.call))
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
            cost = Cost(seconds, 2 * seconds, seconds, inner=call.computed, backward_peak=call.computed)
        elif not self._device.measured:
            cost = replace(cost, forward=seconds, backward=2 * seconds, first=seconds)
        operations, nbytes, kept, of_results = look.around[index] if index < len(look.around) else (0, 0, 0, 0)
        more = self._device.computes(operations, nbytes)
        return replace(
            cost,
            forward=cost.forward + more,
            backward=cost.backward + 2 * more,
            first=cost.first + 2 * more,
            around=nbytes,
            kept=kept,
            outputs=max(cost.outputs, of_results),
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


def _inputs(call: TracedCall, cost: Cost, code: CodeAround) -> dict[Hashable, float]:
    """The bytes of a call's inputs that are held, by their memory."""
    tensors = [x for x in tree_leaves(code.given.get((call.unit, call.call))) if isinstance(x, Tensor)]
    keys = [x.memory if isinstance(x, AbsentTensor) else memory_of(x) for x in tensors]
    return {key: nbytes for key, nbytes in zip(keys, cost.inputs, strict=False) if nbytes}


def _chunk(items: Sequence[tuple[TracedCall, Cost]], again: Collection[str], code: CodeAround) -> ChunkCost:
    """The calls of a chunk together. Layers in ``again`` run again in the backward. What is held as an input isn't
    counted once more as an output, or as the input of another call."""
    taken = {key for call, cost in items for key in _inputs(call, cost, code)}
    inputs: dict[Hashable, float] = {}
    held = most_forward = most_backward = 0.0
    for call, cost in items:
        is_taken = not taken.isdisjoint(code.returned.get((call.unit, call.call), ()))
        inner = cost.inner + (0.0 if is_taken else cost.outputs)
        held += 0.0 if call.unit in again else inner
        own = _inputs(call, cost, code)
        if call.unit in again and not own:
            # The inputs of a layer that runs again are outputs of others: about as large as its own.
            own = {call.needs: cost.returned}
        inputs |= {key: max(inputs.get(key, 0.0), nbytes) for key, nbytes in own.items()}
        there = held + sum(inputs.values()) + cost.returned + (inner if call.unit in again else 0.0)
        # The code after it runs when the layer is done, and its backward when the layer's hasn't begun. That has the
        # gradients of its results, and of what these are made of: of the layer's output, for one.
        most_forward = max(most_forward, there + cost.forward_peak, there + cost.around)
        more = cost.kept + cost.around + max(0.0, cost.around - cost.returned)
        most_backward = max(most_backward, there + cost.backward_peak, there + more)
        held += cost.kept
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
        forward_peak=round(most_forward),
        backward_peak=round(most_backward),
        messages=messages,
    )


def _with_messages(
    chunks: Sequence[ChunkCost], items: Sequence[Sequence[tuple[TracedCall, Cost]]], placement: Placement
) -> list[ChunkCost]:
    """The chunks with the bytes that cross the cuts between them, or stay on a stage for a later one. What the code
    around the layers reads at the step's end isn't known: it is taken to be the last layer's."""
    needed: dict[str, set[int]] = {}  # by origin, the chunks
    for number, own in enumerate(items):
        for call, _ in own:
            for origin in call.needs:
                needed.setdefault(origin, set()).add(number)
    sent, stays, awaited = ([0.0] * len(chunks) for _ in range(3))
    for number, own in enumerate(items):
        for call, cost in own:
            users = [each for each in needed.get(call.origin, ()) if each > number]
            crossed, pairs = way_of(number, users, placement) if users else (set(), set())
            for cut in crossed:
                sent[cut] += cost.returned
            for one, other in pairs:
                stays[one] += cost.returned
                awaited[other] += cost.returned
    # What its last layer doesn't return is there besides: given to a chunk, and as gradients that come back.
    more = [max(0.0, s - (own[-1][1].returned if own else 0.0)) for s, own in zip(sent, items, strict=True)]
    given = [before + here for before, here in zip([0.0, *more], awaited, strict=False)]
    return [
        replace(
            chunk,
            forward_peak=round(chunk.forward_peak + given[c]),
            backward_peak=round(chunk.backward_peak + given[c] + more[c] + stays[c]),
            sent=round(sent[c]),
            stays=round(stays[c]),
            awaited=round(awaited[c]),
        )
        for c, chunk in enumerate(chunks)
    ]
