"""A look at a step that tells what crosses the cuts in it (``flow.py``), or why it can't be run in stages."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_parallel.pipeline.absent import TakesGradientsError
from lightning_parallel.pipeline.flow import Cargo, Flow, FlowError
from lightning_parallel.pipeline.one_sided import check_one_sided, stages_running
from lightning_parallel.pipeline.origins import origin_of_parameter, parameter_of
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.trace import names_of, trace
from lightning_parallel.pipeline.traced import Call, Trace, TracedCall, Update
from lightning_parallel.torch_private import has_full_backward_hooks


def survey(module: nn.Module, partition: Partition, step: Callable[[], Any], logged: Sequence[Any] = ()) -> Flow:
    """Watch one step, and tell what crosses the cuts. What it returns, logs and leaves on modules is needed on the last
    stage. So is the first value that it asks for after the last stage's first call: the survey ends there, but the last
    stage itself will have the value.

    Args:
        module: the module whose parts ``step`` calls.
        partition: who owns what.
        step: the user's step, bound to a batch.
        logged: a list in which ``step`` leaves what it logs.

    Raises:
        FlowError: a stage needs what a later stage computes, what a stage computes after it has left the step, or a
            parameter that it doesn't hold; or stages would draw, count or update differently from one process.
        Exception: the step's own, if it came before the last stage's first call. An ``AbsentValueError`` says that the
            code before or between the layers asks for values that only one stage has.
    """
    units = partition.units
    names = names_of(module) | {id(module.get_submodule(name)): name for name in units}
    seen = trace(module, units.__contains__, step, names=names, logged=logged, plain_values=True)
    placed = _placed(seen.calls, partition)
    # Later errors are the last stage's: what the loss can't do with absent values, it may do with real ones.
    if seen.stopped is not None and max(placed, default=0) < partition.stages - 1:
        raise seen.stopped
    flow = _Flows(seen, partition, placed).flow()
    _check_backward_hooks(module, flow)
    _check_gradients(module, flow, {(call.unit, call.call) for call in seen.calls if call.detached})
    return flow


def _check_backward_hooks(module: nn.Module, flow: Flow) -> None:
    for name in {cargo.module for cut in flow.cuts for cargo in cut}:
        if torch.is_grad_enabled() and has_full_backward_hooks(module.get_submodule(name)):
            raise RuntimeError(
                f"'{name}' has a full backward hook, and its output crosses a cut, where it would miss gradients. "
                f"Register it on a module inside '{name}'."
            )


def _check_gradients(module: nn.Module, flow: Flow, detached: Container[Call]) -> None:
    for stage, cut in enumerate(flow.cuts):
        for cargo in cut:
            trains = any(p.requires_grad for p in module.get_submodule(cargo.module).parameters())
            if trains and (cargo.module, cargo.call) in detached:
                raise RuntimeError(
                    f"'{cargo.module}' hands its output from stage {stage} to a later one, but runs under "
                    f"torch.no_grad() or in a checkpoint with use_reentrant=True, so no gradient would come back: use "
                    f"use_reentrant=False, or freeze it with requires_grad_(False)."
                )


def _placed(calls: Sequence[TracedCall], partition: Partition) -> list[int]:
    """The stage of each call. If that is before a stage that has been reached already, the call comes too late."""
    placed: list[int] = []
    reached = 0
    for call in calls:
        placed.append(partition.stage_of((call.unit, call.call), reached))
        reached = max(reached, placed[-1])
    return placed


class _Flows:
    """Follows each value from the call that computes it to the last stage that needs it."""

    def __init__(self, seen: Trace, partition: Partition, stages: Sequence[int]) -> None:
        self._seen, self._partition = seen, partition
        self._stages = stages  # of each call
        self._position = seen.position()
        # A value inside a unit (0) is computed before the unit's output (1).
        self._order = {origin: (escape.within, 0, i) for i, (origin, escape) in enumerate(seen.escapes.items())}
        self._order |= {origin: (index, 1, 0) for origin, index in self._position.items()}
        self._needed: dict[str, int] = {}  # by origin: the last stage that needs it
        self._transparent: set[str] = set()
        self._late: set[int] = set()  # indices of calls whose stage has left the step by then
        reached = 0
        for i, stage in enumerate(self._stages):
            if stage < reached:
                self._late.add(i)
            reached = max(reached, stage)

    def flow(self) -> Flow:
        self._check_gradients_taken()
        check_one_sided(self._seen, self._stages, self._partition.stages)
        for index in self._seen.overwriting:
            if self._stages[index] < self._partition.stages - 1:
                raise FlowError(
                    f"'{self._seen.calls[index].unit}' on stage {self._stages[index]} changes a tensor of the batch in "
                    f"place. Later stages still have the old values: set inplace=False there, or hand it a clone."
                )
        for i, call in enumerate(self._seen.calls):
            if i not in self._late:
                self._need(call.needs, f"'{call.unit}'", self._stages[i])
        self._need(self._seen.end, "the end of the step", self._partition.stages - 1)
        for update in self._seen.updates:
            self._need_update(update)
        cuts: list[list[Cargo]] = [[] for _ in range(self._partition.stages - 1)]
        inside: set[str] = set()
        for origin in sorted(self._needed, key=self._order.__getitem__):
            if origin in self._position:
                index = self._position[origin]
                call = self._seen.calls[index]
                cargo = Cargo(call.unit, call.call, call.tensors)
            else:
                escape = self._seen.escapes[origin]
                index = escape.within
                cargo = Cargo(*escape.module, escape.tensors or 0)
                inside.add(cargo.module)
            for cut in range(self._stages[index], self._needed[origin]):
                cuts[cut].append(cargo)
        last: list[Call | None] = [None] * self._partition.stages
        for i, (call, stage) in enumerate(zip(self._seen.calls, self._stages, strict=True)):
            if i not in self._late:
                last[stage] = (call.unit, call.call)
        in_step = [update for update in self._seen.updates if update.place is not None]
        by_layers = {update.name for update in in_step if any(parameter_of(origin) is None for origin in update.needs)}
        return Flow(
            tuple(map(tuple, cuts)),
            tuple(last),
            frozenset(self._transparent),
            frozenset(inside),
            frozenset(update.name for update in in_step) - by_layers,
            frozenset(by_layers).union(each.name for each in self._seen.carried if each.is_number),
        )

    def _check_gradients_taken(self) -> None:
        """Of what the last stage computes, it may take gradients by itself, by what it has computed or holds."""
        error, last = self._seen.stopped, self._partition.stages - 1
        if not isinstance(error, TakesGradientsError) or last == 0:
            return
        own = {call.origin for call, stage in zip(self._seen.calls, self._stages, strict=True) if stage == last}
        own |= {origin_of_parameter(name) for name, stages in self._partition.owners.items() if stages == (last,)}
        if error.present or not error.origins <= own:
            raise error

    def _need(self, origins: Iterable[str], consumer: str, stage: int) -> None:
        for origin in origins:
            if origin in self._position:
                self._need_output(origin, self._position[origin], consumer, stage)
            elif origin in self._seen.escapes:
                self._need_escape(origin, consumer, stage)
            elif origin in self._seen.writes:
                self._need_written(origin, consumer, stage)
            elif (parameter := parameter_of(origin)) is not None:
                self._need_parameter(parameter, consumer, stage)

    def _need_output(self, origin: str, index: int, consumer: str, stage: int) -> None:
        self._check_order(index, consumer, stage)
        if stage > self._stages[index]:
            self._needed[origin] = max(stage, self._needed.get(origin, 0))

    def _need_escape(self, origin: str, consumer: str, stage: int) -> None:
        """What was computed inside a unit, by a module or by the unit's own code from its inputs."""
        escape = self._seen.escapes[origin]
        call = self._seen.calls[escape.within]
        self._check_order(escape.within, consumer, stage)
        if stage == self._stages[escape.within]:
            return
        self._transparent.add(call.unit)
        if escape.tensors is None:
            self._need(escape.needs, consumer, stage)
        else:
            self._needed[origin] = max(stage, self._needed.get(origin, 0))

    def _need_written(self, origin: str, consumer: str, stage: int) -> None:
        """What a call has changed in place is as it was before on stages where the call is absent."""
        owner = self._stages[self._seen.writes[origin]]
        if stage > owner:
            raise FlowError(
                f"{consumer} on stage {stage} uses {origin}, on stage {owner}. Later stages still have the old values: "
                f"set inplace=False there, or hand it a clone."
            )

    def _need_parameter(self, name: str, consumer: str, stage: int) -> None:
        holders = self._partition.holders_of(name)
        if stage not in holders:
            raise FlowError(
                f"{consumer} on stage {stage} reads parameter '{name}', which is on stage {holders[0]}. The pipeline "
                f"was cut by another step, which doesn't read it there: read it in that step too, or only inside its "
                f"module."
            )

    def _need_update(self, update: Update) -> None:
        """A parameter that the code around the units changes must be changed on each stage that holds it."""
        reached = 0 if update.place is None else min(stages_running(update.place, self._stages, self._partition.stages))
        for stage in self._partition.holders_of(update.name):
            if stage < reached:
                raise FlowError(
                    f"The step changes '{update.name}', which is on stage {stage}, after that stage has left it: "
                    f"change it at the beginning of training_step, or in on_train_batch_end."
                )
            self._need(update.needs, f"the update of '{update.name}'", stage)

    def _check_order(self, index: int, consumer: str, stage: int) -> None:
        unit, owner = self._seen.calls[index].unit, self._stages[index]
        if index in self._late:
            before = next(c.unit for c, s in zip(self._seen.calls, self._stages, strict=True) if s > owner)
            raise FlowError(
                f"'{unit}' is on stage {owner}, which leaves the step before this call, made after '{before}'. The "
                f"pipeline was cut by another step, in which '{unit}' comes earlier: call layers in the same order in "
                f"every kind of step."
            )
        if owner > stage:
            raise FlowError(
                f"{consumer} is on stage {stage}, but needs the output of '{unit}' on stage {owner}: call them in the "
                f"same order in every step."
            )
