"""Finds by a dry run of a step what crosses the cuts in it (``flow.py``), or why it can't be run in stages.

A chunk leaves the step after its last layer, and the layers of others don't run in it. So it doesn't draw from the
user's random generators what the rest of the step draws, and has no numbers that other stages' layers keep. Where a
stage runs several chunks, the code around the layers runs once in each of them, for the same microbatch. A step that
would make the stages drift apart from one process is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import nn

from lightning_parallel.absent.origins import origin_of_parameter, parameter_of
from lightning_parallel.absent.tensor import TakesGradientsError
from lightning_parallel.cuts.flow import TWICE, Cargo, Flow, FlowError, Pair, Way, way_of
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.private.torch import has_full_backward_hooks
from lightning_parallel.tracing.dry_run import trace
from lightning_parallel.tracing.trace import Call, Place, Trace, Update
from lightning_parallel.values import first_few


def flow_of_step(module: nn.Module, partition: Partition, step: Callable[[], Any], logged: Sequence[Any] = ()) -> Flow:
    """Trace one step, and find what crosses the cuts. What the step returns, logs and leaves on modules is needed in
    the last chunk. So is the first value that it reads after the last chunk's first call: the dry run ends there, but
    that chunk itself will have the value. ``logged`` is a list to which the step appends what it logs.

    Raises:
        FlowError: a chunk needs what a later one computes, what a chunk computes after it has left the step, or a
            parameter that its stage doesn't hold; or stages would draw, count or update differently from one process.
        Exception: the step's own, if it came before the last chunk's first call. An ``AbsentValueError`` says that the
            code before or between the layers asks for values that only one stage has.
    """
    units = partition.units
    by_id = {id(module.get_submodule(name)): name for name in units}
    seen = trace(module, by_id, step, logged=logged, plain_values=True)
    placed = _placed(seen, partition)
    last = partition.chunks - 1
    # Later errors are the last chunk's: what the loss can't do with absent values, it may do with real ones.
    if seen.stopped is not None and max(placed, default=0) < last:
        raise seen.stopped
    elsewhere = [unit for unit in sorted(seen.beyond) if last not in units[unit]]
    if elsewhere:
        raise FlowError(
            f"The step asks for a value, which only {partition.name_of(last)} has, and then calls '{elsewhere[0]}', "
            f"which is on {partition.name_of(units[elsewhere[0]][-1])}. Ask for it inside a layer's own "
            f"forward, or after the layers. {seen.stopped}"
        )
    _check_buffers(module, partition, seen, placed)
    flow = _Flows(seen, partition, placed).flow()
    if torch.is_grad_enabled():
        _check_gradients(module, partition, flow, seen)
    return flow


def _check_gradients(module: nn.Module, partition: Partition, flow: Flow, seen: Trace) -> None:
    """Refuse layers that would miss the gradient of an output that crosses a cut."""
    calls = {(call.unit, call.call): call for call in seen.calls}
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


def _check_buffers(module: nn.Module, partition: Partition, seen: Trace, placed: Sequence[int]) -> None:
    """Refuse layers that change a buffer that layers of several stages have: each stage would change its own."""
    names: dict[int, list[str]] = {}  # of a buffer, by its id
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    for known in names.values():
        changed = next((name for name in known if name in seen.own_updates), None)
        if changed is None:
            continue
        calls = zip(seen.calls, placed, strict=True)
        holders: dict[int, str] = {}  # the first on each chunk
        for call, chunk in calls:
            if any(name.startswith(f"{call.unit}.") for name in known):
                holders.setdefault(chunk, call.unit)
        stages = {partition.placement[chunk]: chunk for chunk in sorted(holders, reverse=True)}
        if len(stages) > 1:
            where = (f"'{holders[chunk]}' on {partition.name_of(chunk)}" for chunk in sorted(stages.values()))
            raise FlowError(
                f"A layer changes the buffer '{changed}', which {first_few(where)} share: each stage would change its "
                f"own. Fill it in __init__ if it holds constants, such as a table of positions. Else give each layer a "
                f"buffer of its own, or let one stage have these layers (see `layers` and `balance`)."
            )


def _placed(seen: Trace, partition: Partition) -> list[int]:
    """The chunk of each call: as planned, or a later one that has the unit, if it needs what is computed there."""
    placed: list[int] = []
    for call, sources in zip(seen.calls, seen.sources(), strict=True):
        needed = max((placed[i] for i in sources if i < len(placed)), default=0)
        placed.append(partition.chunk_of((call.unit, call.call), needed))
    return placed


class _Flows:
    """Follows each value from the call that computes it to the last chunk that needs it."""

    def __init__(self, seen: Trace, partition: Partition, chunks: Sequence[int]) -> None:
        self._seen, self._partition = seen, partition
        self._chunks = chunks  # of each call
        self._last = partition.chunks - 1
        self._stages, self._name = partition.placement, partition.name_of  # of a chunk
        self._position = {call.origin: i for i, call in enumerate(seen.calls)}
        # A value inside a unit (0) is computed before the unit's output (1).
        self._order = {origin: (escape.within, 0, i) for i, (origin, escape) in enumerate(seen.escapes.items())}
        self._order |= {origin: (index, 1, 0) for origin, index in self._position.items()}
        self._needed: dict[str, set[int]] = {}  # by origin: the later chunks that need it
        self._transparent: set[str] = set()
        self._late = self._late_calls()
        last = {chunk: i for i, chunk in enumerate(chunks) if i not in self._late}
        self._last_calls = [last.get(chunk) for chunk in range(partition.chunks)]  # indices
        self._ends = [self._end_of(chunk) for chunk in range(self._last + 1)]

    def _late_calls(self) -> set[int]:
        """The indices of calls that need what a later chunk computes, and of what their chunks call after them. The
        chunk has left the step by then."""
        late: set[int] = set()
        has_left: set[int] = set()
        for i, (sources, chunk) in enumerate(zip(self._seen.sources(), self._chunks, strict=True)):
            if chunk in has_left or any(self._chunks[j] > chunk for j in sources):
                has_left.add(chunk)
                late.add(i)
        return late

    def _end_of(self, chunk: int) -> float:
        """Where a chunk leaves the step: the index of its last call. A chunk without calls leaves in front of (-0.5)
        the first call of a later one."""
        if chunk == self._last:
            return inf
        own = self._last_calls[chunk]
        first_later = (i - 0.5 for i, each in enumerate(self._chunks) if each > chunk)
        return next(first_later, inf) if own is None else own

    def flow(self) -> Flow:
        self._check_gradients_taken()
        self._check_draws()
        self._check_plain_reads()
        self._check_carried()
        self._check_counts()
        for index in self._seen.overwriting:
            if any(chunk != self._last for chunk in self._chunks[index:]):  # others run what follows
                raise FlowError(
                    f"'{self._seen.calls[index].unit}' on {self._name(self._chunks[index])} changes a tensor in "
                    f"place that the step gives it, of the batch or made by the step. Other stages still have the old "
                    f"values: set inplace=False there, or hand it a clone."
                )
        for i in sorted(self._late) if torch.is_grad_enabled() else ():
            self._check_order(i, "the step", self._last)  # nobody may need it, but it may count, or update statistics
        for i, call in enumerate(self._seen.calls):
            if i not in self._late:
                self._need(call.needs, f"'{call.unit}'", self._chunks[i])
        self._need(self._seen.end, "the end of the step", self._last)
        for update in self._seen.updates:
            self._need_update(update)
        cargo = {origin: self._cargo(origin) for origin in sorted(self._needed, key=self._order.__getitem__)}
        cuts, kept = self._ways(cargo)
        calls = [(each.unit, each.call) for each in self._seen.calls]
        passed: list[set[Call]] = [set() for _ in self._ends]
        for i, chunk in enumerate(self._chunks):
            for earlier in range(chunk):
                if i < self._ends[earlier]:
                    passed[earlier].add(calls[i])
        in_step = [update for update in self._seen.updates if update.place is not None]
        by_layers = {update.name for update in in_step if update.by_layers}
        return Flow(
            cuts=cuts,
            kept=kept,
            last=tuple(None if index is None else calls[index] for index in self._last_calls),
            passed=tuple(map(frozenset, passed)),
            placed=dict(zip(calls, self._chunks, strict=True)),
            transparent=frozenset(self._transparent),
            inside=frozenset(each.module for origin, each in cargo.items() if origin not in self._position),
            updated=frozenset(update.name for update in in_step) - by_layers,
            carried=frozenset(by_layers).union(each.name for each in self._seen.carried if each.is_number),
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
        for origin in origins:
            if origin in self._order:
                self._need_value(origin, consumer, chunk)
            elif origin in self._seen.writes:
                self._need_written(origin, consumer, chunk)
            elif (parameter := parameter_of(origin)) is not None:
                self._need_parameter(parameter, consumer, chunk)

    def _need_value(self, origin: str, consumer: str, chunk: int) -> None:
        """Need the output of a call, or a value that was computed inside it, by a module or by the unit's own code from
        its inputs."""
        index, *_ = self._order[origin]
        self._check_order(index, consumer, chunk)
        if chunk == self._chunks[index]:
            return
        escape = None if origin in self._position else self._seen.escapes[origin]
        if escape is not None:
            self._transparent.add(self._seen.calls[index].unit)
        if escape is not None and escape.tensors is None:
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
        holders, stage = self._partition.holders_of(name), self._stages[chunk]
        if stage not in holders:
            raise FlowError(
                f"{consumer} on stage {stage} reads '{name}', which is on stage {holders[0]}. A buffer that its layer "
                f"changes can be read in the layer only. Anything else must be read in the step by which the pipeline "
                f"was cut (the first), too."
            )

    def _need_update(self, update: Update) -> None:
        """Need an update of a parameter by the code around the units. Each stage that holds it must change it: in each
        of the stage's chunks that run this code, all of which change it from the same old value."""
        running = self._running(update.place) if update.place else range(self._last + 1)
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
        if index in self._late:
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

    # -- what only some chunks do, though all would have to ------------------------------------------------------

    def _running(self, place: Place) -> list[int]:
        """The chunks that run the code at a place."""
        if place.during == "call" and place.index < len(self._chunks):
            return [self._chunks[place.index]]
        at = place.index - (0 if place.during == "hooks" else 0.5)
        return [chunk for chunk, end in enumerate(self._ends) if at <= end]

    def _with_several(self, chunks: set[int]) -> int | None:
        """A stage that runs several of these chunks."""
        stages = Counter(self._stages[chunk] for chunk in chunks)
        return min((stage for stage, count in stages.items() if count > 1), default=None)

    def _check_gradients_taken(self) -> None:
        """Refuse ``torch.autograd.grad`` between layers, unless the last chunk differentiates by what it has computed
        itself, or by parameters that its stage alone holds."""
        error, stage = self._seen.stopped, self._stages[self._last]
        if not isinstance(error, TakesGradientsError) or self._last == 0:
            return
        own = {call.origin for call, chunk in zip(self._seen.calls, self._chunks, strict=True) if chunk == self._last}
        own |= {origin_of_parameter(name) for name, stages in self._partition.owners.items() if stages == (stage,)}
        if error.present or not error.origins <= own:
            raise error

    def _check_draws(self) -> None:
        """Refuse a generator that lives longer than a step unless each stage draws all of its numbers, or none, and
        in one of its chunks: between two of them it runs other microbatches."""
        for places in self._seen.draws.values():
            running = [chunk for place in places for chunk in self._running(place)]
            again = self._with_several(set(running))
            if again is not None:
                raise FlowError(
                    f"The step draws from a random generator of its own, and would draw several times on stage "
                    f"{again}. {TWICE} draw from torch's default generator, which all stages follow, make the "
                    f"generator anew in each step, or take a schedule with one chunk a stage ('1f1b')."
                )
            chunk, count = min(Counter(running).items(), key=lambda each: each[1], default=(0, len(places)))
            if count < len(places):
                raise FlowError(
                    f"The step draws from a random generator of its own in {len(places)} places, of which stage "
                    f"{self._stages[chunk]} runs {count}, so its numbers would differ from then on. Draw from torch's "
                    f"default generator, which all stages follow, or make the generator anew in each step."
                )

    def _check_plain_reads(self) -> None:
        """Refuse to read a number that another stage's layer keeps."""
        for read in self._seen.plain_reads:
            calls = zip(self._seen.calls, self._chunks, strict=True)
            owners = {chunk for call, chunk in calls if call.unit == read.unit}
            missing = [chunk for chunk in self._running(read.place) if chunk not in owners]
            if not owners or not missing:
                continue
            if read.attribute is None:
                raise FlowError(
                    f"The metric '{read.module}' is updated inside a layer on stage {self._stages[min(owners)]}, and "
                    f"depends on values in a way that can't be followed to the last stage, where metrics are "
                    f"computed. Update it in the step, by what the layer returns (or switch its checks of values off, "
                    f"as nan_strategy='disable' does)."
                )
            if read.is_shared:
                raise FlowError(
                    f"'{read.module}', on {self._name(min(owners))}, changes what its attribute {read.attribute!r} "
                    f"holds, and {self._name(missing[0])} uses the same object, which is another one there. If it "
                    f"is a place to work in, or each layer keeps something of its own there, give each layer an object "
                    f"of its own. Else return from the layer what others need of it, and give it to them as an "
                    f"argument."
                )
            raise FlowError(
                f"'{read.module}', on stage {self._stages[min(owners)]}, keeps something in its attribute "
                f"{read.attribute!r} that isn't computed from tensors alone, and stage {self._stages[missing[0]]} "
                f"reads it. It can't be sent: keep a tensor instead of a number (without .item()), or return it."
            )

    def _check_counts(self) -> None:
        """Refuse a layer that is called in several chunks and counts its calls: each stage would count its own, and a
        chunk sees microbatches in an order of its own."""
        for name in sorted(self._seen.counts):
            calls = zip(self._seen.calls, self._chunks, strict=True)
            chunks = {chunk: call.unit for call, chunk in calls if name.startswith(f"{call.unit}.")}
            if len(chunks) > 1:
                raise FlowError(
                    f"'{chunks[min(chunks)]}' is called on {first_few(map(self._name, sorted(chunks)))}, and each call "
                    f"changes its '{name}', as a count does: it would be another one there. Call the layer once in a "
                    f"step, on all inputs together (torch.cat), or let one stage make all of its calls (see `layers` "
                    f"and `balance`)."
                )

    def _check_carried(self) -> None:
        """Refuse what the step keeps for the next one if a stage reads it that doesn't change it, or changes it several
        times."""
        for carried in self._seen.carried:
            readers = {chunk for place in carried.reads for chunk in self._running(place)}
            writers = {chunk for place in carried.writes for chunk in self._running(place)}
            for place in carried.writes:
                stale = readers.difference(self._running(place))
                if stale:
                    raise FlowError(
                        f"The step reads '{carried.name}' on stage {self._stages[min(stale)]}, but changes it after "
                        f"that stage has left the step, so the stage keeps the old value: change it at the beginning "
                        f"of the step, or in a hook such as on_train_batch_end."
                    )
            again = self._with_several(writers)
            if again is not None:
                raise FlowError(
                    f"The step reads and changes '{carried.name}', and would change it several times on stage "
                    f"{again}. {TWICE} change it in a hook such as on_train_batch_start, or take a schedule with one "
                    f"chunk a stage ('1f1b')."
                )
