"""What a schedule costs on paper is what theory says."""

from __future__ import annotations

import re
from functools import partial

import pytest

from lightning_parallel.schedules.actions import Backward, BackwardInput, BackwardWeight, Forward, Schedule, Step
from lightning_parallel.schedules.checks import of_one_update
from lightning_parallel.schedules.generators import gpipe, interleaved, one_f_one_b
from lightning_parallel.schedules.named import SCHEDULES
from lightning_parallel.schedules.simulate import Timed, busy_across_batches, most_held, simulate
from lightning_parallel.schedules.v_shaped import vhalf, vmin, zbv, zbv_in_bytes
from tests.thorough import thorough
from tools.schedule.costs import peak_activations


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (2, 1), (2, 8), (4, 2), (4, 4), (8, 16)])
def test_the_simulated_bubble_is_the_formula_s(stages: int, microbatches: int) -> None:
    formulas = {
        "naive": (stages - 1) / stages,
        "gpipe": (stages - 1) / (microbatches + stages - 1),
        "1f1b": (stages - 1) / (microbatches + stages - 1),
    }
    assert formulas.keys() == SCHEDULES.keys() - {"interleaved", "zbv", "vhalf", "vmin"}
    for name, formula in formulas.items():
        schedule = SCHEDULES[name](stages, microbatches)
        assert simulate(schedule, forward=20.0, backward=40.0).bubble == pytest.approx(formula)
        assert simulate(schedule).bubble == pytest.approx(formula)


def test_durations_may_differ_by_stage_and_steps_count_as_busy() -> None:
    simulation = simulate(gpipe(2, 2), forward=[1.0, 3.0], backward=[2.0, 5.0], step=[0.0, 0.5])
    assert simulation.rows[0] == [
        Timed(Forward(0, 0), 0.0, 1.0),
        Timed(Forward(0, 1), 1.0, 2.0),
        Timed(Backward(0, 0), 12.0, 14.0),
        Timed(Backward(0, 1), 17.0, 19.0),
        Timed(Step(0, 0), 19.0, 19.0),
    ]
    assert simulation.rows[1][-1] == Timed(Step(1, 0), 17.0, 17.5)
    assert simulation.busy == [6.0, 16.5]
    assert simulation.bubble == pytest.approx(1 - 22.5 / 38)


@pytest.mark.parametrize(("arguments", "setting"), [
    ({"forward": 0.0}, "forward=0.0"),
    ({"forward": [1.0]}, "one for each of the 2 chunks"),
    ({"step": -1.0}, "step=-1.0"),
    ({"latency": -0.1}, "latency=-0.1"),
    ({"first": -0.1}, "first=-0.1"),
])  # fmt: skip
def test_bad_durations_are_refused_by_name(arguments: dict[str, float], setting: str) -> None:
    with pytest.raises(ValueError, match=re.escape(setting)):
        simulate(gpipe(2, 2), **arguments)


# Latency 0.05, forward = first half = second half of the backward = 1 for a whole stage.
@pytest.mark.parametrize(
    ("stages", "count", "chunks", "busy"),
    [(4, 8, 2, 0.822), (4, 8, 4, 0.865), (8, 16, 2, 0.800), (8, 16, 4, 0.852), (16, 32, 2, 0.789)],
)
def test_interleaving_divides_the_bubble(stages: int, count: int, chunks: int, busy: float) -> None:
    simulation = simulate(interleaved(stages, count, chunks), 1 / chunks, 2 / chunks, latency=0.05)
    assert 1 - simulation.bubble == pytest.approx(busy, abs=5e-4)
    without_latency = simulate(interleaved(stages, count, chunks), 1 / chunks, 2 / chunks)
    assert without_latency.makespan == pytest.approx(3 * count + 3 * (stages - 1) / chunks)


@pytest.mark.parametrize(
    ("stages", "count", "alone", "following"),
    [(4, 8, 0.914, 0.964), (4, 16, 0.955, 0.982), (8, 16, 0.901, 0.958), (8, 32, 0.948, 0.979), (4, 4, 0.851, 0.851)],
)
def test_a_v_keeps_stages_busy_and_more_so_across_batches(
    stages: int, count: int, alone: float, following: float
) -> None:
    assert 1 - simulate(zbv(stages, count), 0.5, 1.0, latency=0.05).bubble == pytest.approx(alone, abs=1e-3)
    if count >= 2 * stages - 1:  # in forwards of a whole stage
        assert simulate(zbv(stages, count), 0.5, 1.0).makespan == pytest.approx(3 * (count + (stages - 1) / 6))
        assert busy_across_batches(zbv(stages, count)) == pytest.approx(1)
    assert busy_across_batches(zbv(stages, count), latency=0.1) == pytest.approx(following, abs=1e-3)
    assert busy_across_batches(one_f_one_b(stages, count)) == pytest.approx(count / (count + stages - 1))


@pytest.mark.parametrize(
    ("stages", "count", "half", "least"), [(4, 8, (3.0, 0.906), (2.0, 0.814)), (8, 16, (5.0, 0.850), (4.0, 0.807))]
)
def test_v_half_and_v_min_hold_less_and_wait_less_than_1f1b(
    stages: int, count: int, half: tuple[float, float], least: tuple[float, float]
) -> None:
    for generator, (held, busy) in ((vhalf, half), (vmin, least)):
        lists = generator(stages, count)
        assert max(peak_activations(lists)) / 2 == held
        assert 1 - simulate(lists).bubble == pytest.approx(busy, abs=1e-3)
        assert busy > 1 - simulate(one_f_one_b(stages, count)).bubble


@pytest.mark.parametrize("stages", [*range(1, 5), *thorough(5, 6, 7, 8)])
def test_any_limit_of_activations_gives_lists_that_keep_to_it_or_is_refused(stages: int) -> None:
    least = max(peak_activations(vmin(stages, 4 * stages)))
    for limit in range(2 * stages + 1):
        part = limit / (2 * stages)
        if limit < least and stages > 1:
            with pytest.raises(ValueError, match="activation_memory=") as refused:
                zbv(stages, 1, part)
            advised = float(str(refused.value).split("at least ")[1].split(",")[0])
            assert max(peak_activations(zbv(stages, 4 * stages, advised))) == least
            continue
        for count in range(1, 3 * stages + 1, 1 + stages // 3):
            lists = of_one_update(partial(zbv, activation_memory=part), stages, count)
            assert max(peak_activations(lists)) <= max(limit, least)


def test_a_limit_in_bytes_holds_for_short_batches_with_unequal_chunks_too() -> None:
    sizes = [10] * 6 + [100, 10]

    def fullest(lists: Schedule) -> int:
        return max(most_held(actions, sizes, sizes) for actions in lists)

    for limit in (230, 300, 400):
        for count in range(1, 9):
            assert fullest(zbv_in_bytes(4, count, limit, fullest)) <= limit
    assert zbv_in_bytes(4, 8, 10**6, fullest) == zbv(4, 8)
    assert zbv_in_bytes(4, 8, 1, fullest) == vmin(4, 8)


def test_the_halves_of_a_backward_share_its_time() -> None:
    row = simulate(zbv(1, 1), 1.0, 4.0).rows[0]
    assert [timed.end - timed.start for timed in row] == [1.0, 1.0, 2.0, 4.0, 2.0, 0.0]
    row = simulate(zbv(1, 1), 1.0, 4.0, first=[1.0, 0.75]).rows[0]
    assert [timed.end - timed.start for timed in row] == [1.0, 1.0, 3.0, 4.0, 1.0, 0.0]


def test_a_chunk_s_activations_are_held_to_the_end_of_its_backward() -> None:
    actions = [Forward(0, 0), Forward(1, 0), BackwardInput(1, 0), BackwardInput(0, 0), Forward(0, 1)]
    actions += [BackwardWeight(1, 0), BackwardWeight(0, 0), Backward(0, 1)]
    assert most_held(actions, [3, 5], None) == 3 + 5  # nothing waits between halves
    assert most_held(actions, [3, 5], [3, 5]) == 3 + 5 + 3  # the second forward comes between them
    assert most_held(actions, [3, 5], [10, 20]) == 10 + 20 + 3  # as where layers run again in the first half
