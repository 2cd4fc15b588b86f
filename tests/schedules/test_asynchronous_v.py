"""The endless lists of a V: they can run however batches come, hold no more than they promise, and never flush."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from lightning_parallel.schedules.actions import Action, BackwardWeight, Forward, Step, StepOfChunk
from lightning_parallel.schedules.asynchronous_v import AsyncV, VShape
from lightning_parallel.schedules.blocks import PERIOD
from lightning_parallel.schedules.checks import dependency_order, validate
from lightning_parallel.schedules.named import asynchronous
from lightning_parallel.schedules.simulate import most_held, simulate
from lightning_parallel.schedules.steady import steady
from tests.thorough import thorough
from tools.schedule.costs import peak_activations
from tools.schedule.figures import clock_table

SHAPES: tuple[VShape, ...] = ("vhalf", "vmin")
LEAST = {("vhalf", 4): 6, ("vmin", 4): 4, ("vhalf", 8): 10, ("vmin", 8): 8}


def sliced(shape: VShape, stages: int, batches: Sequence[tuple[int, bool, bool]]) -> list[list[list[Action]]]:
    """By stage, a slice for each batch, given the microbatches of each, whether it ends an update, and whether a drain
    follows it; the last slice is the last drain."""
    made = []
    for stage in range(stages):
        endless, slices = AsyncV(stages, stage, shape), []
        for count, ends_update, drains in batches:
            slices.append([*endless.feed(count, ends_update=ends_update), *(endless.drain() if drains else ())])
        made.append([*slices, [*endless.drain()]])
        assert not [*endless.drain()]
    return made


def joined(slices: list[list[list[Action]]]) -> list[list[Action]]:
    return [[action for each in own for action in each] for own in slices]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [*range(10), *thorough(*range(10, 16))])
def test_lists_of_any_batches_with_accumulation_and_drains_are_valid_slice_by_slice(seed: int, shape: VShape) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 6 if seed < 10 else 16)
    batches = [(draw.randint(1, 3 * stages), draw.random() < 0.7, draw.random() < 0.2) for _ in range(12)]
    batches.append((draw.randint(1, 4), True, False))
    slices = sliced(shape, stages, batches)
    validate(joined(slices))
    before: list[list[Action]] = [[] for _ in range(stages)]
    fed = 0
    for number, (count, _, _) in enumerate(batches):
        for stage in range(stages):
            forwards = Counter(a.microbatch for a in slices[stage][number] if isinstance(a, Forward))
            assert forwards == Counter(dict.fromkeys(range(fed, fed + count), 2)), "both chunks', of this batch alone"
            before[stage] += slices[stage][number]
        fed += count
        for _ in dependency_order(before):  # no stage waits for what another one runs in a later slice
            pass


def test_a_chunk_steps_when_its_gradients_are_complete_and_the_later_one_first() -> None:
    for stage, actions in enumerate(asynchronous(4, 2, 6, schedule="vmin")):
        steps = Counter(action.chunk for action in actions if isinstance(action, StepOfChunk))
        assert steps == {3 - stage: 6, 4 + stage: 6}
        later = [i for i, a in enumerate(actions) if isinstance(a, StepOfChunk) and a.chunk >= 4]
        first = [i for i, a in enumerate(actions) if isinstance(a, StepOfChunk) and a.chunk < 4]
        assert all(one < other for one, other in zip(later, first, strict=True))
        whole = [i for i in later if isinstance(actions[i - 1], BackwardWeight)]
        assert len(whole) == 6, "at once"


@pytest.mark.parametrize(("changed", "message"), [
    (lambda steps: steps[::-1], "comes before that of a later chunk"),
    (lambda steps: steps[:1] * 2, r"chunk=1\) comes where update 1 is due"),
    (lambda steps: steps[:1], "a Step is missing"),
])  # fmt: skip
def test_steps_of_chunks_are_checked(changed: Callable[[list[Action]], list[Action]], message: str) -> None:
    (actions,) = joined(sliced("vmin", 1, [(1, True, False)]))
    steps: list[Action] = [action for action in actions if isinstance(action, Step)]
    others = [action for action in actions if not isinstance(action, Step)]
    validate([[*others, *steps]])
    with pytest.raises(ValueError, match=message):
        validate([[*others, *changed(steps)]])


@pytest.mark.parametrize(("shape", "stages"), LEAST)
def test_what_the_lists_cost(shape: VShape, stages: int) -> None:
    """Beside asynchronous 1F1B, whose first stage holds `stages` microbatches, which are (stages - 1) / 2 late."""
    found = steady(shape, stages, 2 * stages)
    lists = asynchronous(stages, 2 * stages, 9, schedule=shape)
    validate(lists)
    assert max(peak_activations(lists)) == LEAST[shape, stages]  # chunks
    late = [2 * stages * each for each in found.staleness]  # microbatches
    assert sum(late) / len(late) < (stages - 1) / 2 * (0.72 if shape == "vmin" else 1.42 if stages == 4 else 1.11)
    assert max(found.most) == 1 and found.staleness[-1] == 0
    assert found.busy > (0.95 if shape == "vhalf" else 0.88)
    assert found.busy < steady(shape, stages, 4 * stages).busy


def test_messages_of_v_half_cost_nothing_once_it_is_full() -> None:
    """Its hops leave a clock between two stages' messages. What messages cost is by batch, where it is empty."""
    lost = [1 / steady("vhalf", 4, m, latency=0.1).busy - 1 / steady("vhalf", 4, m).busy for m in (12, 24)]
    assert lost[1] < 0.6 * lost[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_what_long_batches_cost_follows_from_shorter_ones(shape: VShape, stages: int) -> None:
    microbatches, updates = 5 * stages + 1, 5
    made = asynchronous(stages, microbatches, updates, schedule=shape)
    late: Counter[int] = Counter()  # by chunk, of the batch in the middle
    for actions in made:
        steps: Counter[int] = Counter()
        for action in actions:
            if isinstance(action, StepOfChunk):
                steps[action.chunk] += 1
            elif isinstance(action, Forward) and action.microbatch // microbatches == 2:
                late[action.chunk] += 2 - steps[action.chunk]
    found = steady(shape, stages, microbatches)
    assert [late[chunk] / microbatches for chunk in range(2 * stages)] == pytest.approx(found.staleness, abs=1e-12)
    last = [t for t in simulate(made).rows[-1] if isinstance(t.action, Forward) and t.action.chunk == 2 * stages - 1]
    ends = {timed.action.microbatch: timed.end for timed in last if isinstance(timed.action, Forward)}
    period = (ends[4 * microbatches - 1] - ends[2 * microbatches - 1]) / 2
    assert found.busy == pytest.approx(PERIOD * microbatches / period, abs=1e-12)


def test_very_long_batches_are_not_counted_out() -> None:
    began = time.thread_time()
    assert 0 < steady("vhalf", 8, 2_000).staleness[0] < 1e-2
    assert time.thread_time() - began < 10


def test_a_drain_and_small_batches_hold_no_more() -> None:
    batches = [(16, True, False), (3, True, False), (16, True, True), (16, True, False)]
    for actions in joined(sliced("vmin", 8, batches)):
        assert most_held(actions, [1] * 16, [1] * 16) <= LEAST["vmin", 8]


def test_the_documented_table_is_what_the_lists_are() -> None:
    documented = re.findall(r"stage \d \|.*", AsyncV.__doc__ or "")
    assert documented == clock_table(simulate(asynchronous(2, 2, 2, schedule="vhalf"))).splitlines()
