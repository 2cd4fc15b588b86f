"""The schedule for a model is the fastest on paper that fits, and the banner says what decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_parallel.layout import Placement
from lightning_parallel.pipeline.actions import placement
from lightning_parallel.pipeline.choosing import Estimate, choose, estimate, reason
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.partitioning import partition
from lightning_parallel.pipeline.schedule import SCHEDULES
from lightning_parallel.pipeline.simulate import simulate

AUTO = ("1f1b", "interleaved", "zbv")
MUCH = 2**40


def cut(widths: list[int], stages: int, places: Placement, recompute: bool = False) -> Partition:
    """A chain of pairs of layers of these inner widths, in chunks."""
    blocks = [nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for width in widths]
    module = nn.Sequential(*blocks)
    return partition(
        module,
        lambda: module(torch.ones(4, 8)).sum(),
        stages,
        layers=[str(i) for i in range(len(widths))],
        balance="layers",
        placement=places,
        recompute=recompute,
    )


def estimates(
    widths: list[int], stages: int, microbatches: int, halves: bool = True, overhead: float = 0.0
) -> dict[str, Estimate]:
    found = {}
    for name in AUTO:
        lists = SCHEDULES[name](stages, microbatches)
        found[name] = estimate(lists, cut(widths, stages, placement(lists)), overhead, halves=halves)
    return found


def test_chunks_know_what_they_compute_and_hold() -> None:
    parts = cut([8, 16, 16, 8], 2, (0, 1))
    assert parts.work == (2 * 4 * 8 * 2 * (8 + 16),) * 2
    # 4 samples: of each layer the output, and that of the ReLU between two.
    assert parts.held == (4 * 4 * (8 + 8 + 8 + 16 + 16 + 8),) * 2
    assert cut([8, 16, 16, 8], 2, (0, 1), recompute=True).held == (4 * 4 * 2 * 8,) * 2  # what layers return


def test_equal_chunks_are_as_busy_as_the_simulation_says() -> None:
    found = estimates([8] * 16, 4, 8)
    lists = SCHEDULES["1f1b"](4, 8)
    assert found["1f1b"].busy == pytest.approx(1 - simulate(lists, 1, 2).bubble)
    assert found["1f1b"].busy < found["interleaved"].busy < found["zbv"].busy
    without = estimates([8] * 16, 4, 8, halves=False)
    assert without["zbv"].busy < found["zbv"].busy and without["1f1b"] == found["1f1b"]


def test_small_chunks_are_not_worth_their_actions() -> None:
    """What an action takes besides its work counts for each, and a split schedule has three times as many."""
    one = cut([8] * 16, 4, (0, 1, 2, 3)).work[0]  # a whole stage's forward
    small, large = (estimates([8] * 16, 4, 8, overhead=one * each) for each in (0.5, 0.01))
    assert small["1f1b"].busy > max(small["interleaved"].busy, small["zbv"].busy)
    assert large["1f1b"].busy < large["interleaved"].busy < large["zbv"].busy
    lists = SCHEDULES["1f1b"](4, 8)
    simulation = simulate(lists, 1.5, 2.5, latency=0.5)
    assert small["1f1b"].busy == pytest.approx(8 * 3 / simulation.makespan)
    split = SCHEDULES["zbv"](2, 2)
    ends = simulate(split, 1.5, 2 * 1.045 + 2 * 0.5, latency=0.5).makespan
    parts = replace(cut([8] * 4, 2, placement(split)), work=(100,) * 4)
    assert estimate(split, parts, 50, halves=True).busy == pytest.approx(2 * 2 * 3 / ends)


def test_activations_held_are_the_lists() -> None:
    found = estimates([8] * 16, 4, 8)
    each = cut([8] * 16, 4, (0, 1, 2, 3)).held[0]  # a whole stage's, of a microbatch
    assert found["1f1b"].held == 4 * each
    assert found["interleaved"].held == 11 * each // 2
    assert found["zbv"].held == 4 * each


def test_chunks_without_a_formula_count_as_next_to_nothing() -> None:
    lists = SCHEDULES["1f1b"](2, 4)
    parts = cut([8, 8, 8, 8], 2, placement(lists))
    assert estimate(lists, replace(parts, work=(0, 0)), 0, halves=True) == estimate(lists, parts, 0, halves=True)
    assert estimate(lists, replace(parts, work=(0, 100)), 0, halves=True).busy == pytest.approx(0.5, abs=0.05)


def test_layers_that_run_again_are_held_whole_between_halves() -> None:
    lists = SCHEDULES["zbv"](4, 8)
    parts = cut([8] * 16, 4, placement(lists), recompute=True)
    again, once = estimate(lists, parts, 0, halves=True, recompute=True), estimate(lists, parts, 0, halves=True)
    assert parts.held[0] < parts.computed[0] and again.held > 8 * parts.held[0] and again.busy != once.busy
    plain = SCHEDULES["1f1b"](4, 8)
    whole = cut([8] * 16, 4, placement(plain), recompute=True)
    assert estimate(plain, whole, 0, halves=True, recompute=True).held == 4 * whole.held[0] < again.held


def test_a_chunk_that_is_much_larger_makes_a_schedule_slow() -> None:
    even, uneven = estimates([8] * 8, 4, 16), estimates([8] * 7 + [64], 4, 16)
    assert all(uneven[name].busy < even[name].busy - 0.2 for name in AUTO)


@pytest.mark.parametrize(
    ("free", "expected"),
    [(MUCH, "quick"), (1000, "quick"), (999, "slim"), (100, "slim"), (0, "slim")],
)
def test_the_fastest_that_fits_is_chosen(free: int, expected: str) -> None:
    found = {"plain": Estimate(0.7, 900), "slim": Estimate(0.8, 800), "quick": Estimate(0.9, 1000)}
    assert choose(found, free) == expected


def test_of_equally_fast_ones_the_one_that_holds_least_is_chosen_and_then_the_plainest() -> None:
    assert choose({"plain": Estimate(0.895, 900), "quick": Estimate(0.9, 1000)}, MUCH) == "plain"
    assert choose({"plain": Estimate(0.9, 900), "other": Estimate(0.9, 900)}, MUCH) == "plain"


def test_the_reason_has_every_figure_that_decided() -> None:
    found = {"1f1b": Estimate(0.7, 3 * 2**29), "interleaved": Estimate(0.9, 5 * 2**31)}
    assert reason("1f1b", found, 2**33, 8) == (
        "schedule='auto' takes '1f1b'. By simulation with 8 microbatches, stages compute 70% of the time with '1f1b' "
        "(1.5 GiB of activations on the fullest stage), 90% of the time with 'interleaved' (10 GiB of activations on "
        "the fullest stage, too much). About 8 GiB are there for activations."
    )
    said = "About 1 MiB are there for activations. None fits: this one holds least."
    assert reason("1f1b", found, 2**20, 8).endswith(said)
