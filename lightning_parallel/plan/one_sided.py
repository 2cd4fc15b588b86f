"""Refuses steps that do something in some chunks only that all would have to do.

A chunk leaves the step after its last layer, and the layers of others don't run in it. So it doesn't draw from the
user's random generators what the rest of the step draws, and has no numbers that other stages' layers keep. Where a
stage runs several chunks, the code around the layers runs once in each of them, for the same microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lightning_parallel.plan.flow import FlowError
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.tracing.trace import Place, Trace

TWICE = "A stage with several chunks runs this code once in each of them:"


def chunks_running(place: Place, chunks_of_calls: Sequence[int], chunks: int) -> range:
    """The chunks that run the code at a place. ``chunks_of_calls`` gives the chunk of each call of the step, in
    order."""
    if place.during == "call" and place.index < len(chunks_of_calls):
        chunk = chunks_of_calls[place.index]
        return range(chunk, chunk + 1)
    before = chunks_of_calls[: place.index + (place.during == "hooks")]
    reached = max(before, default=0)
    # After its last call a chunk has left the step: the hooks on it are the last that it runs.
    has_left = place.during == "code" and reached in before and reached not in chunks_of_calls[place.index :]
    return range(min(reached + has_left, chunks - 1), chunks)


_Runs = Callable[[Place], range]  # the chunks that run the code at a place


def check_one_sided(seen: Trace, chunks_of_calls: Sequence[int], placement: Placement) -> None:
    """Refuse steps that would make the stages drift apart from one process, step by step.

    Raises:
        FlowError: a stage draws only some numbers of a generator, or draws them several times; it reads a number that
            another stage's layer keeps, or a counter that it doesn't count, or counts several times.
    """
    runs = partial(chunks_running, chunks_of_calls=chunks_of_calls, chunks=len(placement))
    _check_draws(seen, runs, placement)
    _check_plain_reads(seen, runs, chunks_of_calls, placement)
    _check_carried(seen, runs, placement)


def _check_draws(seen: Trace, runs: _Runs, placement: Placement) -> None:
    """Refuse a generator that lives longer than a step unless each stage draws all of its numbers, or none, and each
    once."""
    for places in seen.draws.values():
        for stage in range(max(placement) + 1):
            times = [sum(placement[chunk] == stage for chunk in runs(place)) for place in places]
            if max(times) > 1:
                raise FlowError(
                    f"The step draws from a random generator of its own, and would draw several times on stage "
                    f"{stage}. {TWICE} draw from torch's default generator, which all stages follow, make the "
                    f"generator anew in each step, or take a schedule with one chunk a stage ('1f1b')."
                )
            if sum(times) not in (0, len(places)):
                raise FlowError(
                    f"The step draws from a random generator of its own in {len(places)} places, of which stage "
                    f"{stage} runs {sum(times)}, so its numbers would differ from then on. Draw from torch's default "
                    f"generator, which all stages follow, or make the generator anew in each step."
                )


def _check_plain_reads(seen: Trace, runs: _Runs, chunks_of_calls: Sequence[int], placement: Placement) -> None:
    for read in seen.plain_reads:
        owners = {chunk for call, chunk in zip(seen.calls, chunks_of_calls, strict=True) if call.unit == read.unit}
        missing = [chunk for chunk in runs(read.place) if chunk not in owners]
        if not owners or not missing:
            continue
        if read.attribute is None:
            raise FlowError(
                f"The metric '{read.module}' is updated inside a layer on stage {placement[min(owners)]}, and depends "
                f"on values in a way that can't be followed to the last stage, where metrics are computed. Update it "
                f"in the step, by what the layer returns (or switch its checks of values off, as "
                f"nan_strategy='disable' does)."
            )
        raise FlowError(
            f"'{read.module}', on stage {placement[min(owners)]}, keeps something in its attribute {read.attribute!r} "
            f"that isn't computed from tensors alone, and stage {placement[missing[0]]} reads it. It can't be sent: "
            f"keep a tensor instead of a number (without .item()), or return it."
        )


def _check_carried(seen: Trace, runs: _Runs, placement: Placement) -> None:
    for carried in seen.carried:
        readers = {chunk for place in carried.reads for chunk in runs(place)}
        writers = {chunk for place in carried.writes for chunk in runs(place)}
        for place in carried.writes:
            stale = readers.difference(runs(place))
            if stale:
                raise FlowError(
                    f"The step reads '{carried.name}' on stage {placement[min(stale)]}, but changes it after that "
                    f"stage has left the step, so the stage keeps the old value: change it at the beginning of the "
                    f"step, or in a hook such as on_train_batch_end."
                )
        stages = [placement[chunk] for chunk in writers]
        again = next((stage for stage in stages if stages.count(stage) > 1), None)
        if again is not None:
            raise FlowError(
                f"The step reads and changes '{carried.name}', and would change it several times on stage {again}. "
                f"{TWICE} change it in a hook such as on_train_batch_start, or take a schedule with one chunk a stage "
                f"('1f1b')."
            )
