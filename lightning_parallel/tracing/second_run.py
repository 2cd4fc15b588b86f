"""Runs a traced step once more with guesses, for what its trace lacks.

A step that asks for a value (``loss.item()``) ends its trace there. And what modules keep besides absent tensors has no
origins: who writes it and who reads it shows when its uses are watched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from itertools import chain, zip_longest
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.absent.modes import ValuesGuessed, WritesFollowed
from lightning_parallel.absent.origins import METRIC_STATE
from lightning_parallel.absent.tensor import AbsentTensor, first_absent
from lightning_parallel.private.torch.modules import buffers_of
from lightning_parallel.tracing.plain_values import attribute_uses
from lightning_parallel.tracing.recorder import Recorder, Scene, origins_in
from lightning_parallel.tracing.snapshot import StateKept, goes_on
from lightning_parallel.tracing.trace import Carried, Place, PlainRead, Trace

_NUMBERS = (Number, np.generic, np.ndarray, Tensor)


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
    # What a unit keeps of absent tensors has origins.
    kept = ((part, name) for part, names in written.items() for name in names)
    followed = {each for each in kept if first_absent(_value_of(*each)) is not None}
    watching: dict[nn.Module, set[str]] = {}
    for part, attributes in chain(written.items(), shared.items(), common.items()):
        watching.setdefault(part, set()).update(attributes)
    if not watching:
        return
    uses: dict[Any, list[_Use]] = {}  # in a run, of an attribute (by its part and name), or a shared object (by its id)

    def watched(recorder: Recorder) -> AbstractContextManager[None]:
        def told(part: nn.Module, attribute: str, assigned: bool) -> None:
            value = _value_of(part, attribute)
            use = _Use(part, attribute, recorder.place, assigned, value, second.content_of(value))
            if attribute in shared.get(part, ()) and attribute in vars(part) and not assigned:
                uses.setdefault(id(value), []).append(use)
            is_written = attribute in written.get(part, ())
            if is_written or attribute in common.get(part, ()):
                uses.setdefault((part, attribute), []).append(use)
            is_own = id(part) in units and (assigned or recorder.is_under_way(part))
            if is_written and id(part) in units and not is_own and (part, attribute) not in followed:
                read = PlainRead(units[id(part)], scene.names[id(part)], attribute, recorder.place)
                seen.plain_reads.append(read)

        uses.clear()
        return attribute_uses(watching, told)

    calls = {(call.unit, call.call) for call in seen.calls}
    is_repeated = False  # has a run made all calls again?
    with StateKept(scene.module, apart=scene.units) as second:
        for recorder, _ in _guessed(scene, step, 0.5, watched):
            is_repeated |= calls <= {(call.unit, call.call) for call in recorder.trace.calls}
            for key, used in uses.items():
                first = used[0]
                part, attribute = first.part, first.attribute
                is_attribute, is_common = isinstance(key, tuple), attribute in common.get(part, ())
                value = _value_of(part, attribute) if is_attribute else first.value
                now = second.content_of(value)
                if is_common or not is_attribute:
                    seen.plain_reads += _reads_of_shared(scene, recorder.trace, used, now)
                if not is_attribute or first.assigns:
                    continue
                # It is read first: the value of the step before.
                reads, writes = _reads_and_writes(used, now)
                in_unit, is_number = id(part) in units, isinstance(value, _NUMBERS)
                by_step = tuple(place for place in writes if place.during == "code" or not in_unit)
                is_written = attribute in written.get(part, ())
                differs = is_written or first.before != now or by_step != writes
                name = scene.name_of(part, attribute)
                if by_step and differs and not (in_unit and isinstance(part, Metric)):
                    seen.carried.append(Carried(name, is_number, reads, by_step))
                elif writes and is_written and not isinstance(part, Metric):
                    seen.own_updates |= {name: False} if is_number else {}
                    seen.counts |= {name} if goes_on(first.before, now) else set()
    named = {name: part for part in (*shared, *common) for name in scene.owners.get(id(part), ())}
    having = [(i, call.unit) for i, call in enumerate(seen.calls) if call.unit in named]
    for i, _ in () if is_repeated else having:  # any may change for others what couldn't be seen
        unit = having[0][1]
        part = named[unit]
        read = PlainRead(unit, scene.names[id(part)], min(watching[part]), Place(i, "call"), is_shared=True)
        seen.plain_reads.append(read)
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


def _value_of(part: nn.Module, attribute: str) -> Any:
    return vars(part).get(attribute, buffers_of(part).get(attribute))


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


def _reads_and_writes(uses: Sequence[_Use], at_end: Any) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """The places where an attribute is only read, and those where it is changed: assigned to, or changed in place
    before its next use or before the end of the step, when it holds ``at_end``."""
    reads: list[Place] = []
    writes: list[Place] = []
    for use, later in zip_longest(uses, uses[1:]):
        changed_in_place = use.before != (at_end if later is None else later.before)
        (writes if use.assigns or changed_in_place else reads).append(use.place)
    return tuple(reads), tuple(writes)
