"""What each call of a module's step takes, by the number of samples of a microbatch.

A step is traced on two numbers of samples, on tensors without values. Each kind of call in it is tried once for each
(``layer_costs.py``), and what lies between is on a line. The code around the layers, such as the loss, isn't tried: its
results are counted, and it takes as long as these need to be written and read. It belongs to the call before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from lightning_parallel.absent.tensor import AbsentValueError
from lightning_parallel.costs.chunk_costs import ChunkCost, of_chunks
from lightning_parallel.costs.code_around import Around, CodeAround
from lightning_parallel.costs.devices import Device, as_one_of
from lightning_parallel.costs.layer_costs import Cost, kind_of, tried
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.interception import Interception
from lightning_parallel.private.group_on_paper import GroupOnPaper
from lightning_parallel.private.torch.tensors import FakeTensorMode
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.trace import TracedCall


@dataclass(frozen=True)
class _Traced:
    """A step on some samples: its calls, what each takes, and the code around them."""

    samples: int
    calls: Sequence[TracedCall]
    costs: Sequence[Cost]
    code: CodeAround


class Profile:
    """What the calls of a module's step take on a device.

    Args:
        step_of: gives the step on about so many samples, and their true number.
        sizes: the least number of samples to trace, and the most.
        device: the rates of the device.
        tried_on: where layers are tried.
        context: the precision's.
        ranks: that share this machine's cores, one of which this process is while it tries a layer.
        group: the tensor ranks among which the module is divided.

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
        group: GroupOnPaper,
    ) -> None:
        self.untried: set[str] = set()
        self._module, self._step_of, self._sizes = module, step_of, sizes
        self._device, self._tried_on, self._context, self._ranks, self._group = device, tried_on, context, ranks, group
        self._traces: dict[frozenset[str], list[_Traced]] = {}
        self._costs: dict[Any, Cost | None] = {}
        self._found: dict[Any, list[tuple[TracedCall, Cost]]] = {}  # by units and samples

    def chunks(self, parts: Partition, samples: int, *, recompute: bool = False) -> list[ChunkCost]:
        """What each chunk takes for a microbatch of so many samples. With ``recompute``, of layers only the inputs are
        held, and they run again in the backward."""
        costs = self.calls(parts, samples)
        code = self._traces[frozenset(parts.units)][0].code
        return of_chunks(costs, parts, code, set(parts.layers) if recompute else set())

    def seconds(self, parts: Partition, samples: int) -> list[float]:
        """The seconds of each call in the chain of layers, forward and backward, with the calls that go with it."""
        costs = {call.key: cost for call, cost in self.calls(parts, samples)}
        found, waiting = [], 0.0
        for call in parts.calls:  # in the order in which they are shared out
            waiting += costs[call].forward + costs[call].backward
            if call[0] in parts.layers:
                found.append(waiting)
                waiting = 0.0
        return [*found[:-1], found[-1] + waiting]

    def calls(self, parts: Partition, samples: int) -> list[tuple[TracedCall, Cost]]:
        """Each call of the step with what it takes."""
        units = frozenset(parts.units)
        if (units, samples) not in self._found:
            self._found[units, samples] = self._mixed(units, samples)
        return [(call, cost) for call, cost in self._found[units, samples] if call.key in parts.calls]

    def _mixed(self, units: frozenset[str], samples: int) -> list[tuple[TracedCall, Cost]]:
        if units not in self._traces:
            self._traces[units] = self._traced(units)
        traces = self._traces[units]
        weights = [samples / traces[0].samples]
        if len(traces) > 1:
            part = (samples - traces[0].samples) / (traces[1].samples - traces[0].samples)
            weights = [1 - part, part]
        # On fewer samples than were tried, a line through two times would make their differences larger.
        share = min(1.0, samples / traces[0].samples)
        return [
            (call, Cost.mixed(each, weights).at_least(share, each[0]))
            for call, *each in zip(traces[0].calls, *(traced.costs for traced in traces), strict=True)
        ]

    def _traced(self, units: frozenset[str]) -> list[_Traced]:
        """The step on the least number of samples, and on the most; on the most alone, if others call other units."""
        few, many = self._sizes
        found = [self._trace(units, many)]
        with suppress(ValueError):  # some layers, such as BatchNorm, refuse one sample
            fewer = self._trace(units, few)
            same_calls = [call.origin for call in fewer.calls] == [call.origin for call in found[0].calls]
            if same_calls and fewer.samples < found[0].samples:
                found.insert(0, fewer)
        return found

    def _trace(self, units: frozenset[str], size: int) -> _Traced:
        step, samples = self._step_of(size)
        parts = {id(self._module.get_submodule(name)): name for name in units}
        code, watched = CodeAround(), Interception()
        for name in units:
            unit = self._module.get_submodule(name)
            watched.before(unit, partial(code.before, name))
            watched.after(unit, code.after, first=True)

        def run() -> Any:
            with code:
                return step()

        try:
            seen = trace(self._module, parts, run)
        finally:
            watched.remove()
        if seen.stopped is not None and not isinstance(seen.stopped, AbsentValueError):
            raise ValueError(f"The step can't be traced: {type(seen.stopped).__name__}: {seen.stopped}")
        each = zip(seen.calls, chain(code.found(), repeat(Around())), strict=False)  # code after calls that have ended
        costs = [self._cost(call, code, after) for call, after in each]
        return _Traced(samples, seen.calls, costs, code)

    def _cost(self, call: TracedCall, code: CodeAround, after: Around) -> Cost:
        given = code.given.get(call.key)
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
        more = self._device.computes(after.operations, after.nbytes)
        return replace(
            cost,
            forward=cost.forward + more,
            backward=cost.backward + 2 * more,
            first=cost.first + 2 * more,
            around=after.nbytes,
            kept=after.kept,
            outputs=max(cost.outputs, after.of_results),
            returned=call.returned,
        )

    def _tried(self, unit: nn.Module, args: Any, kwargs: Any) -> Cost | None:
        """What a unit takes; None if it can't be run on stand-ins."""
        call = unit, args, kwargs, self._tried_on, self._context, self._group, self._device
        if not self._device.measured:
            with suppress(Exception), FakeTensorMode():  # any: of the user's layer, which may read values
                return tried(*call, on_paper=True)
        try:
            with as_one_of(self._ranks, self._tried_on):
                return tried(*call)
        except Exception:  # any: of the user's layer, which may need other values than random ones
            return None
