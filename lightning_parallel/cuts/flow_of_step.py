"""Finds by a dry run of a step what crosses the cuts in it (``flow.py``), or why it can't be run in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_parallel.absent.origins import from_parameters, parameter_of
from lightning_parallel.absent.tensor import AbsentValueError, TakesGradientsError
from lightning_parallel.cuts.flow import TWICE, Cargo, Flow, FlowError, Pair, Way, way_of
from lightning_parallel.cuts.one_sided import refuse_one_sided
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.cuts.placed_step import PlacedStep
from lightning_parallel.private.torch.modules import has_full_backward_hooks
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.trace import Call, Trace, Update


def flow_of_step(module: nn.Module, partition: Partition, step: Callable[[], Any], logged: Sequence[Any] = ()) -> Flow:
    """Trace one step, and find what crosses the cuts. What the step returns, logs and leaves on modules is needed in
    the last chunk. So is the first value that it reads after the last chunk's first call, or anywhere in an evaluation:
    the dry run ends there, but that chunk itself will have the value. ``logged`` is a list to which the step appends
    what it logs.

    Raises:
        FlowError: a chunk needs what a later one computes, what a chunk computes after it has left the step, or a
            parameter that its stage doesn't hold; or stages would draw, count or update differently from one process.
        Exception: the step's own, if it came before the last chunk's first call. In training, an ``AbsentValueError``
            says that the code before or between the layers asks for values that only one stage has, or that the step
            takes gradients.
    """
    units = partition.units
    by_id = {id(module.get_submodule(name)): name for name in units}
    exits = {chunk: call for call, chunk in partition.calls.items()}.values()  # the last call of each chunk
    calls = len(partition.calls)
    seen = trace(module, by_id, step, logged=logged, exits=exits, plain_values=True, calls=calls)
    placed = PlacedStep(seen, partition)
    last = partition.chunks - 1
    takes_gradients = isinstance(seen.stopped, TakesGradientsError) and last > 0
    # An evaluation may leave the last layers out, and then ask for a value: the last chunk has it all the same.
    is_asked_in_evaluation = isinstance(seen.stopped, AbsentValueError) and not torch.is_grad_enabled()
    # What the loss can't do with absent values, the last chunk may do with real ones.
    is_of_last_chunk = max(placed.chunks, default=0) == last or is_asked_in_evaluation
    if seen.stopped is not None and (takes_gradients or not is_of_last_chunk):
        raise seen.stopped
    elsewhere = [unit for unit in sorted(seen.beyond) if last not in units[unit]]
    if elsewhere:
        raise FlowError(
            f"The step asks for a value, which only {partition.name_of(last)} has, and then calls '{elsewhere[0]}', "
            f"which is on {partition.name_of(units[elsewhere[0]][-1])}. Ask for it inside a layer's own "
            f"forward, or after the layers. {seen.stopped}"
        )
    refuse_one_sided(module, placed)
    flow = _Flows(placed).flow()
    if torch.is_grad_enabled():
        _check_gradients(module, partition, flow, seen)
    return flow


def _check_gradients(module: nn.Module, partition: Partition, flow: Flow, seen: Trace) -> None:
    """Refuse layers that would miss the gradient of an output that crosses a cut."""
    calls = {call.key: call for call in seen.calls}
    last = max((i for i, call in enumerate(seen.calls) if call.in_function), default=-1)
    before = [module.get_submodule(call.unit) for call in seen.calls[: last + 1]]
    passes_gradients = any(parameter.requires_grad for unit in before for parameter in unit.parameters())
    crossing = [*enumerate(flow.cuts), *((chunk, kept) for (chunk, _), kept in flow.kept.items())]
    for chunk, cargo in ((chunk, cargo) for chunk, cut in crossing for cargo in cut):
        unit = module.get_submodule(cargo.module)
        if has_full_backward_hooks(unit):
            raise RuntimeError(
                f"'{cargo.module}' has a full backward hook, and its output crosses a cut, where it would miss "
                f"gradients. Register it on a module inside '{cargo.module}'."
            )
        call = calls.get((cargo.module, cargo.call))
        is_trained = any(parameter.requires_grad for parameter in unit.parameters())
        if call and ((call.in_function and passes_gradients) or (call.in_inference and is_trained)):
            raise RuntimeError(
                f"'{cargo.module}' hands its output from {partition.name_of(chunk)} to a later one, but runs in a "
                f"checkpoint with use_reentrant=True, another autograd.Function or torch.inference_mode(), so no "
                f"gradient would come back: use use_reentrant=False, or torch.no_grad()."
            )


class _Flows:
    """Follows each value from the call that computes it to the last chunk that needs it."""

    def __init__(self, placed: PlacedStep) -> None:
        self._placed, self._seen, self._partition, self._chunks = placed, placed.seen, placed.partition, placed.chunks
        self._last = self._partition.chunks - 1
        self._stages, self._name = self._partition.placement, self._partition.name_of  # of a chunk
        self._position = {call.origin: i for i, call in enumerate(self._seen.calls)}
        # A value inside a unit (0) is computed before the unit's output (1).
        self._order = {origin: (escape.within, 0, i) for i, (origin, escape) in enumerate(self._seen.escapes.items())}
        self._order |= {origin: (index, 1, 0) for origin, index in self._position.items()}
        self._needed: dict[str, set[int]] = {}  # by origin: the later chunks that need it
        self._transparent: set[str] = set()

    def flow(self) -> Flow:
        late = self._placed.late
        for i in sorted(late) if torch.is_grad_enabled() else ():
            self._check_order(i, "the step", self._last)  # nobody may need it, but it may count, or update statistics
        for i, call in enumerate(self._seen.calls):
            if i not in late:
                self._need(call.needs, f"'{call.unit}'", self._chunks[i])
        self._need(self._seen.end, "the end of the step", self._last)
        for update in self._seen.updates:
            self._need_update(update)
        cargo = {origin: self._cargo(origin) for origin in sorted(self._needed, key=self._order.__getitem__)}
        cuts, kept = self._ways(cargo)
        calls = [each.key for each in self._seen.calls]
        passed: list[set[Call]] = [set() for _ in self._placed.ends]
        for i, chunk in enumerate(self._chunks):
            for earlier in range(chunk):
                if i < self._placed.ends[earlier]:
                    passed[earlier].add(calls[i])
        in_step = [update for update in self._seen.updates if update.place is not None]
        by_layers = {update.name for update in in_step if update.by_layers}
        return Flow(
            cuts=cuts,
            kept=kept,
            last=tuple(None if index is None else calls[index] for index in self._placed.last_calls),
            passed=tuple(map(frozenset, passed)),
            placed=dict(zip(calls, self._chunks, strict=True)),
            transparent=frozenset(self._transparent),
            inside=frozenset(each.module for origin, each in cargo.items() if origin not in self._position),
            updated=frozenset(update.name for update in in_step) - by_layers,
            carried=frozenset(by_layers).union(each.name for each in self._seen.carried if each.is_number),
            put_back=frozenset(self._seen.put_back),
            own_updates=self._seen.own_updates,
        )

    # -- ways to the chunks that need a value ----------------------------------------------------------------------

    def _cargo(self, origin: str) -> Cargo:
        if origin in self._position:
            call = self._seen.calls[self._position[origin]]
            return Cargo(call.unit, call.call, call.tensors)
        escape = self._seen.escapes[origin]
        return Cargo(*escape.module, escape.tensors or 0)

    def _ways(self, cargo: dict[str, Cargo]) -> tuple[tuple[tuple[Cargo, ...], ...], dict[Pair, tuple[Cargo, ...]]]:
        """What crosses each cut, and what stays on a stage. If nothing were left for a cut, nothing stays: with its
        message's gradients comes the number by which they are divided."""
        ways: dict[str, Way] = {}
        sent: dict[str, Way] = {}  # if nothing stays
        for origin in cargo:
            owner, users = self._chunks[self._order[origin][0]], self._needed[origin]
            ways[origin] = way_of(owner, users, self._stages)
            sent[origin] = set(range(owner, max(users))), set()
        if set().union(*(cuts for cuts, _ in ways.values())) < set().union(*(cuts for cuts, _ in sent.values())):
            ways = sent
        crossing: list[list[Cargo]] = [[] for _ in range(self._last)]
        kept: dict[Pair, list[Cargo]] = {}
        for origin, each in cargo.items():
            cuts, pairs = ways[origin]
            for cut in cuts:
                crossing[cut].append(each)
            for pair in pairs:
                kept.setdefault(pair, []).append(each)
        return tuple(map(tuple, crossing)), {pair: tuple(each) for pair, each in sorted(kept.items())}

    # -- what a chunk needs --------------------------------------------------------------------------------------

    def _need(self, origins: Iterable[str], consumer: str, chunk: int) -> None:
        for origin in sorted(origins):  # an error names the first
            if origin in self._order:
                self._need_value(origin, consumer, chunk)
            elif origin in self._seen.writes:
                self._need_written(origin, consumer, chunk)
            elif (parameter := parameter_of(origin)) is not None:
                self._need_parameter(parameter, consumer, chunk)

    def _need_value(self, origin: str, consumer: str, chunk: int) -> None:
        """Need the output of a call, or a value that was computed inside it: by a module, or by the unit's own code
        from its inputs or from its parameters."""
        index, *_ = self._order[origin]
        unit, owner = self._seen.calls[index].unit, self._chunks[index]
        self._check_order(index, consumer, chunk)
        if chunk == owner:
            return
        if origin in self._position:
            self._needed.setdefault(origin, set()).add(chunk)
            return
        escape = self._seen.escapes[origin]
        if origin == from_parameters(*escape.module) and self._stages[owner] == self._stages[chunk]:
            raise FlowError(
                f"'{unit}', on {self._name(owner)}, keeps a value that it computes with parameters of its own, and "
                f"{consumer} on {self._name(chunk)} of the same stage uses it, where the layer is absent. Return the "
                f"value beside the layer's output, or take a schedule with one chunk a stage ('1f1b')."
            )
        self._transparent.add(unit)
        if escape.tensors is None:  # the unit's own code computes it again there
            self._need(escape.needs, consumer, chunk)
        else:
            self._needed.setdefault(origin, set()).add(chunk)

    def _need_written(self, origin: str, consumer: str, chunk: int) -> None:
        """Need a tensor that a call has changed in place. In chunks where the call is absent, it is as it was
        before."""
        owner = self._chunks[self._seen.writes[origin]]
        if chunk > owner:
            raise FlowError(
                f"{consumer} on {self._name(chunk)} uses {origin}, on {self._name(owner)}. Later ones "
                f"still have the old values: set inplace=False there, or hand it a clone."
            )

    def _need_parameter(self, name: str, consumer: str, chunk: int) -> None:
        holders = self._partition.holders_of(name)
        if self._stages[chunk] not in holders:
            raise FlowError(
                f"{consumer} on stage {self._stages[chunk]} reads '{name}', which is on stage {holders[0]}. A buffer "
                f"that its layer changes can be read in the layer only. Anything else must be read in the step by "
                f"which the pipeline was cut (the first), too."
            )
        unit = next((unit for unit in self._partition.units if name.startswith(f"{unit}.")), "")
        calling = self._placed.calling(unit)
        if not self._seen.own_updates.get(name, True) and calling and chunk not in calling:
            raise FlowError(
                f"{consumer} on {self._name(chunk)} reads '{name}', which '{unit}' on {self._name(min(calling))} "
                f"changes. Chunks run other microbatches in between, so it would read what one of these has left. It "
                f"can be read in the layer only."
            )

    def _need_update(self, update: Update) -> None:
        """Need an update of a parameter by the code around the units. Each stage that holds it must change it: in each
        of the stage's chunks that run this code, all of which change it from the same old value."""
        running = self._placed.running(update.place) if update.place else range(self._last + 1)
        for stage in self._partition.holders_of(update.name):
            chunks = [chunk for chunk in self._partition.chunks_of(stage) if chunk in running]
            if not chunks:
                raise FlowError(
                    f"The step changes '{update.name}', which is on stage {stage}, after that stage has left it: "
                    f"change it at the beginning of training_step, or in on_train_batch_end."
                )
            # A training step takes back what it changes by parameters alone before it runs again (steps/changes.py).
            taken_back = torch.is_grad_enabled() and not update.by_layers
            if update.place and not taken_back and len(chunks) > 1:
                by = " by what layers return" if update.by_layers else " in evaluation"
                raise FlowError(
                    f"The step changes '{update.name}', on stage {stage},{by}. {TWICE} change it in "
                    f"on_train_batch_end, or take a schedule with one chunk a stage ('1f1b')."
                )
            for chunk in chunks:
                self._need(update.needs, f"the update of '{update.name}'", chunk)

    def _check_order(self, index: int, consumer: str, chunk: int) -> None:
        unit, owner = self._seen.calls[index].unit, self._chunks[index]
        if index in self._placed.late:
            calls = zip(self._seen.calls, self._chunks, strict=True)
            before = next(call.unit for call, its_chunk in calls if its_chunk > owner)
            raise FlowError(
                f"'{unit}' is on {self._name(owner)}, which leaves the step before this call, made after "
                f"'{before}'. The pipeline was cut by another step, in which '{unit}' comes earlier: call layers in "
                f"the same order in every kind of step."
            )
        if owner > chunk:
            raise FlowError(
                f"{consumer} is on {self._name(chunk)}, but needs the output of '{unit}' on "
                f"{self._name(owner)}: call them in the same order in every step."
            )
