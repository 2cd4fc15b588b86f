"""What a step does on some stages only, though all would have to: refused in the look at it.

A stage leaves the step after its last layer, and the layers of others don't run on it. So it doesn't draw from the
user's random generators what the rest of the step draws, and has no numbers that other stages' layers keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lightning_parallel.pipeline.flow import FlowError
from lightning_parallel.pipeline.traced import Place, Trace


def stages_running(place: Place, stages_of_calls: Sequence[int], stages: int) -> range:
    """The stages that run the code at a place.

    Args:
        place: in a step.
        stages_of_calls: of the step, in order.
        stages: how many there are.
    """
    if place.during == "call" and place.index < len(stages_of_calls):
        stage = stages_of_calls[place.index]
        return range(stage, stage + 1)
    before = stages_of_calls[: place.index + (place.during == "hooks")]
    reached = max(before, default=0)
    # After its last call a stage has left the step: the hooks on it are the last that it runs.
    has_left = place.during == "code" and reached in before and reached not in stages_of_calls[place.index :]
    return range(min(reached + has_left, stages - 1), stages)


_Runs = Callable[[Place], range]  # the stages that run the code at a place


def check_one_sided(seen: Trace, stages_of_calls: Sequence[int], stages: int) -> None:
    """Refuse what would make the stages drift apart from one process, step by step.

    Raises:
        FlowError: a stage draws only some numbers of a generator, reads a number that another stage's layer keeps, or
            reads a counter that it doesn't count.
    """
    runs = partial(stages_running, stages_of_calls=stages_of_calls, stages=stages)
    _check_draws(seen, runs, stages)
    _check_plain_reads(seen, runs, stages_of_calls)
    _check_carried(seen, runs)


def _check_draws(seen: Trace, runs: _Runs, stages: int) -> None:
    """Of a generator that lives longer than a step, a stage must draw all or nothing."""
    for places in seen.draws:
        for stage in range(stages):
            count = sum(stage in runs(place) for place in places)
            if 0 < count < len(places):
                raise FlowError(
                    f"The step draws from a random generator of its own in {len(places)} places, of which stage "
                    f"{stage} runs {count}, so its numbers would differ from then on. Draw from torch's default "
                    f"generator, which all stages follow, or make the generator anew in each step."
                )


def _check_plain_reads(seen: Trace, runs: _Runs, stages_of_calls: Sequence[int]) -> None:
    for read in seen.plain_reads:
        owners = {stage for call, stage in zip(seen.calls, stages_of_calls, strict=True) if call.unit == read.unit}
        missing = [stage for stage in runs(read.place) if stage not in owners]
        if not owners or not missing:
            continue
        if read.attribute is None:
            raise FlowError(
                f"The metric '{read.module}' is updated inside a layer on stage {min(owners)}, and depends on values "
                f"in a way that can't be followed to the last stage, where metrics are computed. Update it in the "
                f"step, by what the layer returns (or switch its checks of values off, as nan_strategy='disable' does)."
            )
        raise FlowError(
            f"'{read.module}', on stage {min(owners)}, keeps something in its attribute {read.attribute!r} that "
            f"isn't computed from tensors alone, and stage {missing[0]} reads it. It can't be sent: keep a tensor "
            f"instead of a number (without .item()), or return it."
        )


def _check_carried(seen: Trace, runs: _Runs) -> None:
    for carried in seen.carried:
        readers = {stage for place in carried.reads for stage in runs(place)}
        for place in carried.writes:
            stale = readers.difference(runs(place))
            if stale:
                raise FlowError(
                    f"The step reads '{carried.name}' on stage {min(stale)}, but changes it after that stage has left "
                    f"the step, so the stage keeps the old value: change it at the beginning of the step, or in a hook "
                    f"such as on_train_batch_end."
                )
