"""Schedules: lists that can run, count every microbatch once and hold what they promise."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest

from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    Step,
)
from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.checks import of_one_update, validate
from lightning_parallel.schedules.generators import Generator, gpipe, interleaved, naive, one_f_one_b
from lightning_parallel.schedules.named import SCHEDULES, asynchronous
from lightning_parallel.schedules.simulate import simulate
from lightning_parallel.schedules.v_shaped import zbv
from tests.thorough import thorough
from tools.schedule.costs import peak_activations
from tools.schedule.figures import clock_table

STAGES = range(1, 6)
MICROBATCHES = (1, 2, 3, 4, 5, 8)


def stage(number: int, text: str) -> list[Action]:
    """A stage's actions from "F0 B0 S0"."""
    kinds: dict[str, Callable[[int, int], Action]] = {"F": Forward, "B": Backward, "S": Step}
    return [kinds[word[0]](number, int(word[1:])) for word in text.split()]


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("stages", STAGES)
def test_activations_held(stages: int, microbatches: int) -> None:
    assert peak_activations(naive(stages, microbatches)) == [1] * stages
    assert peak_activations(gpipe(stages, microbatches)) == [microbatches] * stages
    flushed = peak_activations(one_f_one_b(stages, microbatches))
    assert flushed == [min(stages - s, microbatches) for s in range(stages)]
    endless = peak_activations(asynchronous(stages, microbatches, updates=2 * stages))
    assert endless == [stages - s for s in range(stages)]


@pytest.mark.parametrize(("make", "setting"), [
    (lambda: gpipe(0, 1), "stages=0"), (lambda: zbv(2, 0), "microbatches=0"), (lambda: interleaved(2, 2, 0), "chunks=0")
])  # fmt: skip
def test_bad_sizes_are_refused_by_name(make: Callable[[], object], setting: str) -> None:
    with pytest.raises(ValueError, match=re.escape(setting)):
        make()


class Offload(Backward):
    """The engine would take it for a whole backward."""


STAGE_0 = stage(0, "F0 F1 B0 B1 S0")


@pytest.mark.parametrize(("schedule", "message"), [
    *(([STAGE_0, stage(1, text)], message) for text, message in (
        ("F0 B0 F1 S0", r"chunk 1: backwards run in the order \[0\], forwards \[0, 1\]"),
        ("F0 F0 B0 F1 B1 S0", r"stage 1: Forward\(chunk=1, microbatch=0\) comes twice"),
        ("B0 F0 F1 B1 S0", r"stage 1: Backward\(chunk=1, microbatch=0\) comes before its forward"),
        ("F0 B0 F1 B1", r"stage 1: after Backward\(chunk=1, microbatch=1\) a Step is missing"),
        ("F0 B0 F1 B1 S0 S1", r"stage 1: Step\(stage=1, update=1\) has no backward"),
        ("F0 B0 S0 F1 B1 S0", r"stage 1: Step\(stage=1, update=0\) comes where update 1 is due"),
        ("F0 B0 S0 F1 B1 S1", r"chunk 1: update by microbatches \[0\] comes where chunk 0 has \[0, 1\]"),
        ("F1 F0 B1 B0 S0", "chunk 1: forward of microbatch 1 comes where chunk 0 has 0"),
        ("F0 F1 B1 B0 S0", r"chunk 1: backwards run in the order \[1, 0\], forwards \[0, 1\]"),
        ("F0 B0 S0", "chunk 1: forward of microbatch none comes where chunk 0 has 1"),
    )),
    # Stage 0 wants microbatch 0 back before it sends microbatch 1; stage 1 wants both first.
    ([stage(0, "F0 B0 F1 B1 S0"), stage(1, "F0 F1 B0 B1 S0")],
     r"deadlocks: stage 0: Backward\(.*=0\) waits for the gradient of microbatch 0 over cut 0 \| 1; "
     r"stage 1: Forward\(.*=1\) waits for the activation of microbatch 1 over cut 0 \| 1"),
    ([[Forward(0, 0), Backward(0, 0), Step(1, 0)]], r"stage 0: Step\(stage=1, .* belongs to another stage"),
    ([], "no stages"),
    ([[Forward(0, 0), Offload(0, 0), Backward(0, 0), Step(0, 0)]],
     r"stage 0: .*Offload\(chunk=0, microbatch=0\) is none of Forward, Backward"),
])  # fmt: skip
def test_lists_that_cannot_run_are_refused(schedule: Schedule, message: str) -> None:
    validate([STAGE_0, stage(1, "F0 B0 F1 B1 S0")])
    with pytest.raises(ValueError, match=message):
        validate(schedule)


def test_a_chunk_s_backwards_are_where_its_forwards_are() -> None:
    lists: list[list[Action]] = [[Forward(0, 0), Backward(1, 0)], [Forward(1, 0), Backward(0, 0)]]
    with pytest.raises(ValueError, match="comes without a forward of its chunk"):
        simulate(lists)


@pytest.mark.parametrize(("documented", "schedule"), [
    (naive, naive(3, 2)), (gpipe, gpipe(3, 4)), (one_f_one_b, one_f_one_b(3, 4)), (interleaved, interleaved(2, 4)),
    (zbv, zbv(2, 4)), (AsyncOneFOneB, asynchronous(3, 1, updates=6)),
])  # fmt: skip
def test_documented_clock_tables_are_what_the_generators_yield(documented: object, schedule: Schedule) -> None:
    documented_rows = re.findall(r"stage \d \|.*", documented.__doc__ or "")
    drawn = schedule if documented is zbv else simulate(schedule, backward=1.0)
    assert documented_rows == clock_table(drawn).splitlines()


def last_first(stages: int, count: int) -> Schedule:
    """GPipe from the last microbatch to the first. Losses and outputs would be in another order than the batch."""
    numbers = range(count - 1, -1, -1)
    return [
        [*(Forward(stage, k) for k in numbers), *(Backward(stage, k) for k in numbers), Step(stage, 0)]
        for stage in range(stages)
    ]


@pytest.mark.parametrize(("made", "said"), [
    (lambda stages, count: one_f_one_b(stages + 1, count), "there are 3 lists for 2 stages"),
    (lambda stages, count: last_first(stages, count), r"the forwards are of \[2, 1, 0\], not of microbatches 0 to 2"),
    (lambda stages, count: asynchronous(stages, 1, count), "an update has one Step, at its end"),
    (lambda stages, count: [[], []], "stage 0: after no action a Step is missing"),
])  # fmt: skip
def test_a_generator_that_is_not_of_one_update_is_refused_by_name(made: Generator, said: str) -> None:
    with pytest.raises(ValueError, match=f"schedule=<lambda>, 2 stages, 3 microbatches: .*{said}"):
        of_one_update(made, 2, 3)


@pytest.mark.parametrize("stages", [*range(1, 5), *thorough(5, 6, 7, 8)])
def test_lists_are_of_one_update_for_any_sizes(stages: int) -> None:
    for count in range(1, 4 * stages + 2, 1 + stages // 4):
        for name in SCHEDULES:
            of_one_update(SCHEDULES[name], stages, count)
        for chunks in (1, 3, 4):
            of_one_update(partial(interleaved, chunks=chunks), stages, count)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 16), (8, 17)])
def test_activations_held_with_several_chunks(stages: int, count: int) -> None:
    assert peak_activations(zbv(stages, count)) == [2 * stages] * stages
    for chunks in (2, 3):
        size = -(-count // max(1, count // stages))  # of the first round
        expected = [(chunks - 1) * size + 2 * (stages - 1 - s) + 1 for s in range(stages)]
        assert peak_activations(interleaved(stages, count, chunks)) == expected


@pytest.mark.parametrize(("lists", "said"), [
    ([["F0", "B0"], ["F0", "B0", "F1", "B1"]], "chunk 0 is on the stages 0 and 1"),
    ([["F0", "B0"], ["F2", "B2"]], r"the chunks are \[0, 2\]: number them"),
    ([["F1", "B1"], ["F0", "B0"]], "the last chunk, 1, is on stage 0 of 2: put it on the last stage"),
    ([["F0", "I0"], ["F1", "B1"]], r"chunk 0: second halves .* in the order \[\], first halves \[0\]"),
    ([["F0", "W0", "I0"], ["F1", "B1"]], r"BackwardWeight\(chunk=0, microbatch=0\) comes before its BackwardInput"),
    ([["F0", "I0", "B0", "W0"], ["F1", "B1"]], r"chunk 0: backwards run in the order \[0, 0\], forwards \[0\]"),
])  # fmt: skip
def test_lists_with_misplaced_chunks_or_halves_are_refused(lists: list[list[str]], said: str) -> None:
    kinds = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
    schedule: Schedule = [
        [*(kinds[word[0]](int(word[1]), 0) for word in words), Step(stage, 0)] for stage, words in enumerate(lists)
    ]
    with pytest.raises(ValueError, match=said):
        validate(schedule)
