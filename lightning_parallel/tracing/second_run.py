"""Runs a traced step once more with guesses, for what its trace lacks.

A step that asks for a value (``loss.item()``) ends its trace there. And what modules keep besides absent tensors has no
origins: who writes it and who reads it shows when its uses are watched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.absent.modes import ValuesGuessed, WritesFollowed
from lightning_parallel.absent.origins import METRIC_STATE
from lightning_parallel.absent.tensor import AbsentTensor, first_absent
from lightning_parallel.interception import LeaveStep
from lightning_parallel.tracing.plain_values import Attribute, ChangedAttributes, attribute_uses, value_of
from lightning_parallel.tracing.recorder import Recorder, Scene, origins_in
from lightning_parallel.tracing.snapshot import OF_MODULES, StateKept, goes_on
from lightning_parallel.tracing.trace import Carried, Place, PlainRead, Trace

_NUMBERS = (Number, np.generic, np.ndarray, Tensor)
_NOT_KEPT = OF_MODULES | {"forward", "__dict__"}  # the trace replaces forwards, and reads the others


def add_rest(scene: Scene, seen: Trace, step: Callable[[], Any], logged: Sequence[Any]) -> set[Attribute]:
    """The step has stopped because it needs a value. Go on with a guess, and add what the rest needs: it runs in the
    last chunk. Returns the attributes that have other contents at its end than before."""
    known, ends = len(seen.calls), list[set[Attribute]]()
    for recorder, output in _guessed(scene, step, 1.0):
        again = recorder.trace
        further = again.calls[known:]
        seen.end.update(origins_in((output, logged, recorder.end())), *(call.needs for call in further))
        seen.beyond.update(call.unit for call in further)
        seen.draws |= again.draws
        new = {k: v for k, v in again.escapes.items() if k not in seen.escapes and v.within < known}
        seen.escapes.update(new)
        ends.append(scene.state.differing())
    return set.intersection(*ends)  # by one guess it may leave before it puts back: `if loss.isnan(): return`


def add_plain_values(scene: Scene, seen: Trace, changed: ChangedAttributes | None, step: Callable[[], Any]) -> None:
    """Add the uses of what modules keep besides absent tensors. Parts are known by their ids: a metric's hash follows
    its state.

    Args:
        changed: the attributes that have changed by the end of the last call. By default the step runs for them.
    """
    units = {part: names[-1] for part, names in scene.owners.items()}
    written, shared = scene.state.written_plainly(), scene.state.shared_by(scene.owners)
    changed = changed or _changed_by_last_call(scene, seen, step)
    written, shared = written | changed.written, shared | (changed.shared - changed.followed)
    common = set(map(id, scene.common))
    watching = {part for part, _ in written | shared} | common
    parts = [part for part in scene.module.modules() if id(part) in watching]
    if not parts:
        return
    kept = ((id(part), name, value) for part in parts for name, value in vars(part).items())
    of_origins = changed.followed | {(part, name) for part, name, value in kept if first_absent(value) is not None}
    unfollowed = {(part, name) for part, name in written - of_origins if part in units}
    # In a run, the uses of an attribute, by its part's id and its name, and of a shared object, by its id.
    uses: dict[Any, list[_Use]] = {}

    def watched(recorder: Recorder) -> AbstractContextManager[None]:
        def told(part: nn.Module, attribute: str, assigned: bool) -> None:
            key = id(part), attribute
            is_common = id(part) in common and attribute not in _NOT_KEPT
            if not (is_common or key in written or key in shared):
                return
            value = value_of(part, attribute)
            use = _Use(part, attribute, recorder.place, assigned, value, second.content_of(value))
            if key in shared and attribute in vars(part) and not assigned:
                uses.setdefault(id(value), []).append(use)
            if key in written or is_common:
                uses.setdefault(key, []).append(use)
            if key in unfollowed and not assigned and not recorder.is_under_way(part):
                read = PlainRead(units[id(part)], scene.names[id(part)], attribute, recorder.place)
                seen.plain_reads.append(read)

        uses.clear()
        return attribute_uses(parts, told)

    calls = {call.key for call in seen.calls}
    is_repeated = False  # has a run made all calls again?
    with StateKept(scene.module, apart=scene.units) as second:
        for recorder, _ in _guessed(scene, step, 0.5, watched):
            is_repeated |= calls <= {call.key for call in recorder.trace.calls}
            for key, used in uses.items():
                part, attribute, is_attribute = used[0].part, used[0].attribute, isinstance(key, tuple)
                value = value_of(part, attribute) if is_attribute else used[0].value
                now = second.content_of(value)
                if id(part) in common or not is_attribute:
                    seen.plain_reads += _reads_of_shared(scene, recorder.trace, used, now)
                if is_attribute and not used[0].assigns:  # it is read first: the value of the step before
                    _add_kept(scene, seen, used, now, isinstance(value, _NUMBERS), key in written)
    if not is_repeated:
        changing = {part: name for part, name in written | shared if part in common or (part, name) in shared}
        seen.plain_reads += _reads_of_any(scene, seen, changing)
    for metric in scene.metrics():
        is_changed = any(part == id(metric) for part, _ in written)
        if is_changed and origins_in(vars(metric)) <= {METRIC_STATE}:  # it was updated with stand-ins
            read = PlainRead(units[id(metric)], scene.names[id(metric)], None, Place(len(seen.calls)))
            seen.plain_reads.append(read)


def _changed_by_last_call(scene: Scene, seen: Trace, step: Callable[[], Any]) -> ChangedAttributes:
    with StateKept(scene.module, apart=scene.units):
        until = seen.calls[-1].key if seen.calls else None
        # Any error: the trace has it.
        with _silenced(), suppress(Exception, LeaveStep), Recorder(scene, until=until).installed():
            step()
        return scene.changed()


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
        with WritesFollowed(), _silenced():
            with suppress(Exception), around(recorder), recorder.installed(), guesses:  # any error: the trace has it
                try:
                    output = step()
                except SystemExit as error:
                    if type(error) is not SystemExit:  # not the step's sys.exit, but a signal's, such as Lightning's
                        raise
            yield recorder, output
        if not guesses.booleans:
            return


@contextmanager
def _silenced() -> Iterator[None]:
    """Inside, the step prints and warns nothing: the trace has said it, and what it says of guessed values isn't so
    (``if loss.isnan(): warn(...)``)."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class _Use:
    """A use of a part's attribute: its place, whether it is assigned to, the value, and what that was before, for
    comparisons (:meth:`.StateKept.content_of`)."""

    part: nn.Module
    attribute: str
    place: Place
    assigns: bool
    value: Any
    before: Any


def _reads_of_shared(scene: Scene, seen: Trace, uses: Sequence[_Use], at_end: Any) -> Iterator[PlainRead]:
    """The places that begin by reading what several units have, if the call of a unit has changed what they read. What
    the step reads first is from the step before. An absent tensor that the code around the units reads isn't among
    them: its origins tell where it comes from."""
    later = [*(use.before for use in uses[1:]), at_end]
    changes = [use.assigns or use.before != after for use, after in zip(uses, later, strict=True)]
    writer = next((use for use, changed in zip(reversed(uses), reversed(changes), strict=True) if changed), None)
    known: set[Place] = set()
    for use, changed in zip(uses, changes, strict=True):
        is_followed = isinstance(use.value, AbsentTensor) and use.place.during != "call"
        if writer is not None and not use.assigns and not is_followed and use.place not in (writer.place, *known):
            by = writer.place
            if by.during == "call" and by.index < len(seen.calls):
                name = scene.names[id(writer.part)]
                yield PlainRead(seen.calls[by.index].unit, name, writer.attribute, use.place, is_shared=True)
        known.add(use.place)
        writer = use if changed else writer


def _reads_of_any(scene: Scene, seen: Trace, changing: Mapping[int, str]) -> Iterator[PlainRead]:
    """Where no run has made the step's calls again, any unit may change for others what couldn't be seen: all calls of
    units that have one of these attributes, given by the ids of their parts, count as reads."""
    names = {unit: part for part in changing for unit in scene.owners.get(part, ())}
    having = [(i, call.unit) for i, call in enumerate(seen.calls) if call.unit in names]
    for i, _ in having:
        part = names[having[0][1]]
        yield PlainRead(having[0][1], scene.names[part], changing[part], Place(i, "call"), is_shared=True)


def _add_kept(scene: Scene, seen: Trace, uses: Sequence[_Use], at_end: Any, is_number: bool, is_written: bool) -> None:
    """Add an attribute that the step reads before it changes it: a value that is kept for the next step."""
    part, before = uses[0].part, uses[0].before
    reads: list[Place] = []
    writes: list[Place] = []  # assigned to there, or changed in place before its next use or the end of the step
    for use, later in zip_longest(uses, uses[1:]):
        changed_in_place = use.before != (at_end if later is None else later.before)
        (writes if use.assigns or changed_in_place else reads).append(use.place)
    name, in_unit = scene.name_of(part, uses[0].attribute), id(part) in scene.owners
    by_step = [place for place in writes if place.during == "code" or not in_unit]
    differs = is_written or before != at_end or by_step != writes
    if by_step and differs and not (in_unit and isinstance(part, Metric)):
        seen.carried.append(Carried(name, is_number, tuple(reads), tuple(by_step)))
    elif writes and is_written and not isinstance(part, Metric):
        seen.own_updates |= {name: False} if is_number else {}
        seen.counts |= {name} if goes_on(before, at_end) else set()
