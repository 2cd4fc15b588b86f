"""Runs a traced step once more with guesses, for what its trace lacks.

A step that asks for a value (``loss.item()``) ends its trace there. And what modules keep besides absent tensors has no
origins: who writes it and who reads it shows when its uses are watched.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from itertools import chain, zip_longest
from numbers import Number
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_parallel.absent.modes import ValuesGuessed, WritesFollowed
from lightning_parallel.absent.origins import METRIC_STATE
from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.private.torch.modules import buffers_of
from lightning_parallel.tracing.plain_values import attribute_uses
from lightning_parallel.tracing.recorder import Recorder, Scene, origins_in
from lightning_parallel.tracing.snapshot import StateKept, changed_keys
from lightning_parallel.tracing.trace import Call, Carried, Place, PlainRead, Trace


def add_rest(scene: Scene, seen: Trace, step: Callable[[], Any], logged: Sequence[Any]) -> None:
    """The step has stopped because it needs a value. Go on with a guess, and add what the rest needs: it runs in the
    last chunk."""
    known = len(seen.calls)
    for recorder, output in _guessed(scene, step, 1.0):
        again = recorder.trace
        further = again.calls[known:]
        seen.end.update(origins_in((output, logged, recorder.end())), *(call.needs for call in further))
        seen.beyond.update(call.unit for call in further)
        new = {k: v for k, v in again.escapes.items() if k not in seen.escapes and v.within < known}
        seen.escapes.update(new)


def add_plain_values(scene: Scene, seen: Trace, step: Callable[[], Any]) -> None:
    """Add the uses of what modules keep besides absent tensors."""
    written = scene.state.written_plainly()
    units = {part: names[-1] for part, names in scene.owners.items()}
    shared = scene.state.shared_by(scene.owners)
    scene.state.note_assigned(scene.common)
    common = scene.state.assigned
    watching: dict[nn.Module, set[str]] = {}
    for part, attributes in chain(written.items(), shared.items(), common.items()):
        watching.setdefault(part, set()).update(attributes)
    if not watching:
        return
    uses: dict[str, list[_Use]] = {}  # of an attribute in a run, by its name
    of_shared: dict[int, list[_SharedUse]] = {}  # of a container in a run, by its id

    def watched(recorder: Recorder) -> AbstractContextManager[None]:
        def told(part: nn.Module, attribute: str, assigned: bool) -> None:
            if attribute in shared.get(part, ()) and attribute in vars(part) and not assigned:
                value, place = vars(part)[attribute], recorder.place
                earlier = of_shared.setdefault(id(value), [])
                if not (earlier and earlier[-1].place == place and place.during == "call"):
                    earlier.append(_SharedUse(part, attribute, place, value, second.entries_of(value)))
            is_written = attribute in written.get(part, ())
            if not is_written and attribute not in common.get(part, ()):
                return
            is_absent = isinstance(vars(part).get(attribute, buffers_of(part).get(attribute)), AbsentTensor)
            use = _Use(recorder.place, assigned, second.content_of(part, attribute), is_absent)
            uses.setdefault(scene.name_of(part, attribute), []).append(use)
            if is_written and id(part) in units and not assigned and not recorder.is_under_way(part):
                read = PlainRead(units[id(part)], scene.names[id(part)], attribute, recorder.place)
                seen.plain_reads.append(read)

        uses.clear()
        of_shared.clear()
        return attribute_uses(watching, told)

    holders: dict[Any, list[tuple[nn.Module, str]]] = {}  # of what several units have
    for part, attribute in _each(shared):
        holders.setdefault(id(vars(part)[attribute]), []).append((part, attribute))
    holders |= {place: [place] for place in _each(common)}
    made: list[set[Call]] = []  # the calls of each run
    with StateKept(scene.module, apart=scene.units) as second:
        for recorder, _ in _guessed(scene, step, 0.5, watched):
            made.append({(call.unit, call.call) for call in recorder.trace.calls})
            for each in of_shared.values():
                seen.plain_reads += _reads_of_shared(scene, recorder.trace, each, second)
            for part, attribute in _each(common):
                used = uses.get(scene.name_of(part, attribute), [])
                now = second.content_of(part, attribute)
                seen.plain_reads += _reads_of_common(scene, recorder.trace, part, attribute, used, now)
                where, changed = _reads_and_writes(used, now)
                by_step = tuple(place for place in changed if place.during == "code")
                if by_step and not used[0].assigns and (used[0].before != now or by_step != changed):
                    name = scene.name_of(part, attribute)
                    seen.carried.append(Carried(name, second.is_number(part, attribute), where, by_step))
            for part, attribute in _each(written):
                name = scene.name_of(part, attribute)
                used, now = uses.get(name, []), second.content_of(part, attribute)
                if used and not used[0].assigns:  # it is read first: the value of the step before
                    where, changed = _reads_and_writes(used, now)
                    is_number = second.is_number(part, attribute)
                    by_step = tuple(place for place in changed if place.during == "code" or id(part) not in units)
                    if by_step and not (id(part) in units and isinstance(part, Metric)):
                        seen.carried.append(Carried(name, is_number, where, by_step))
                    elif changed and is_number and not isinstance(part, Metric):
                        seen.own_updates[name] = False
                        seen.counts |= {name} if used[0].before != now else set()
    for having in holders.values():
        of_unit = {name: (part, attribute) for part, attribute in having for name in scene.owners.get(id(part), ())}
        calls = {(call.unit, call.call): i for i, call in enumerate(seen.calls) if call.unit in of_unit}
        # If no run has made all of these calls again, some may change for others what couldn't be seen.
        if calls and not any(calls.keys() <= each for each in made):
            unit, _ = next(iter(calls))
            part, attribute = of_unit[unit]
            reads = (Place(i, "call") for i in calls.values())
            seen.plain_reads += [PlainRead(unit, scene.names[id(part)], attribute, i, is_shared=True) for i in reads]
    parts = set(map(id, written))  # a metric's hash follows its state
    for metric in scene.metrics():
        if id(metric) in parts and origins_in(vars(metric)) <= {METRIC_STATE}:  # it was updated with stand-ins
            read = PlainRead(units[id(metric)], scene.names[id(metric)], None, Place(len(seen.calls)))
            seen.plain_reads.append(read)


def _guessed(
    scene: Scene,
    step: Callable[[], Any],
    number: float,
    around: Callable[[Recorder], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[Recorder, Any]]:
    """Run a traced step again, going on where the code around the units needs values: with ``number``, and with False
    for booleans. If it has needed a boolean, it is run once more with True: False may have ended it, as in
    ``if not loss.isfinite(): raise``, or left something out. Each run is inside ``around(recorder)``.

    Yields:
        The recorder of each run, and what the step has returned, or None.
    """
    for truth in (False, True):
        recorder = Recorder(scene)
        guesses = ValuesGuessed(lambda _: recorder.place.during != "call", truth=truth, number=number)  # noqa: B023
        output = None
        # What it says of guessed values isn't so: `if loss.isnan(): warn(...)`.
        with WritesFollowed(), warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            with suppress(Exception), around(recorder), recorder.installed(), guesses:  # any error: the trace has it
                try:
                    output = step()
                except SystemExit as error:
                    if type(error) is not SystemExit:  # not the step's sys.exit, but a signal's, such as Lightning's
                        raise
            yield recorder, output
        if not guesses.booleans:
            return


def _each(attributes: Mapping[nn.Module, set[str]]) -> Iterator[tuple[nn.Module, str]]:
    """The parts with their attributes one by one, in the same order on all ranks."""
    return ((part, name) for part, names in attributes.items() for name in sorted(names))


@dataclass(frozen=True)
class _Use:
    """A use of an attribute: its place, whether it is assigned to, what it held before, and whether that was an absent
    tensor."""

    place: Place
    assigns: bool
    before: Any
    was_absent: bool


@dataclass(frozen=True)
class _SharedUse:
    """The first use at a place of a container that several units share: by whom, and what it held before."""

    part: nn.Module
    attribute: str
    place: Place
    value: Any
    before: dict[Any, Any]


def _reads_of_shared(scene: Scene, seen: Trace, uses: Sequence[_SharedUse], state: StateKept) -> Iterator[PlainRead]:
    """The uses of a container that another unit's call changes. Neither a call that only adds something of its own, as
    to a list of losses, nor the code that empties the container at the beginning of the step counts as a read. But if
    two uses each put a number into a dictionary or an object, one number may be computed from the other: both count."""
    written: dict[Place, set[Any]] = {}
    of_numbers: set[Place] = set()
    is_list = isinstance(uses[0].value, list | set | deque)
    at_end = state.entries_of(uses[0].value)
    for use, later in zip_longest(uses, uses[1:]):
        after = at_end if later is None else later.before
        if use.before and not after and use.place == Place(0):
            continue
        keys = changed_keys(use.before, after)
        written.setdefault(use.place, set()).update(keys)
        if not is_list and any(isinstance(after.get(key), Number) for key in keys):
            of_numbers.add(use.place)
    for place, keys in written.items():
        if keys and place.during == "call" and place.index < len(seen.calls):
            writer = next(use for use in uses if use.place == place)
            for each, own in written.items():
                if each != place and (not own or own & keys or {place, each} <= of_numbers):
                    name = scene.names[id(writer.part)]
                    yield PlainRead(seen.calls[place.index].unit, name, writer.attribute, each, is_shared=True)


def _reads_of_common(
    scene: Scene, seen: Trace, part: nn.Module, attribute: str, uses: Sequence[_Use], at_end: Any
) -> Iterator[PlainRead]:
    """The places that begin by reading an attribute of a part which several units have, if the call of a unit has
    written what they read. What the step reads first is from the step before. An absent tensor that the code around
    the units reads isn't among them: its origins tell where it comes from."""
    later = [*(use.before for use in uses[1:]), at_end]
    changes = [use.assigns or use.before != after for use, after in zip(uses, later, strict=False)]
    writer = next((use.place for use, changed in zip(reversed(uses), reversed(changes), strict=True) if changed), None)
    known: set[Place] = set()
    for use, changed in zip(uses, changes, strict=True):
        by_unit = writer is not None and writer.during == "call" and writer.index < len(seen.calls)
        is_followed = use.was_absent and use.place.during != "call"
        if writer is not None and by_unit and use.place not in (writer, *known) and not use.assigns and not is_followed:
            unit = seen.calls[writer.index].unit
            yield PlainRead(unit, scene.names[id(part)], attribute, use.place, is_shared=True)
        known.add(use.place)
        writer = use.place if changed else writer


def _reads_and_writes(uses: Sequence[_Use], at_end: Any) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The places where an attribute is only read, and those where it is changed: assigned to, or changed in place
    before its next use or before the end of the step, when it holds ``at_end``."""
    reads: list[Place] = []
    writes: list[Place] = []
    for use, later in zip_longest(uses, uses[1:]):
        changed_in_place = use.before != (at_end if later is None else later.before)
        (writes if use.assigns or changed_in_place else reads).append(use.place)
    return tuple(reads), tuple(writes)
