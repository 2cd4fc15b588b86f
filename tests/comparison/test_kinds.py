"""A kind is said only of what it explains to the last entry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_parallel.comparison.kinds import kind_of

RIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PARTS = {f"microbatch {k}": RIGHT * torch.rand(6, 4, generator=torch.Generator().manual_seed(k)) for k in range(3)}
PARTS["microbatch 3"] = RIGHT - torch.stack([*PARTS.values()]).sum(0)


def of(found: Tensor, **known: object) -> str | None:
    return kind_of(found, RIGHT, 1e-9, **known)  # type: ignore[arg-type]


def summed(*counts: float) -> str | None:
    found = torch.stack([count * part for count, part in zip(counts, PARTS.values(), strict=True)]).sum(0)
    return of(found, parts=PARTS)


def flipped() -> Tensor:
    found = RIGHT.clone()
    found[2, 1] *= -1
    return found


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (torch.zeros(6, 4), "zeros"),
        (RIGHT * 3, "a scale: 3 times"),
        (-RIGHT, "a scale: -1 times"),
        (flipped(), "one wrong entry, [2, 1]"),
        (RIGHT + 1, None),
        (RIGHT * torch.linspace(1, 2, 4), None),
        (RIGHT[:3], None),
        (RIGHT * float("nan"), None),
    ],
)
def test_kinds_of_entries(found: Tensor, kind: str | None) -> None:
    assert of(found) == kind


def test_other_masks_are_noise() -> None:
    mask = torch.arange(24).view(6, 4) % 3 == 0
    kept = RIGHT.masked_fill(mask.roll(1, 1), 0)
    assert (
        kind_of(RIGHT.masked_fill(mask, 0), kept, 1e-9) == "noise: other entries are zero, as by another dropout mask"
    )
    assert kind_of(RIGHT.masked_fill(mask, 0), RIGHT, 1e-9) is None  # zeros in some places may be anything


def test_what_stands_in_the_place_of_another() -> None:
    other = RIGHT.flip(0)
    assert of(other, others={"that of microbatch 2": other}) == "that of microbatch 2"


def test_ranks_may_have_their_own_parts() -> None:
    one = RIGHT.roll(1, 0)
    assert of(one, ranks=[one, RIGHT - one]) == "each rank's own part, and their sum is right"
    assert of(one, ranks=[one, 2 * RIGHT - one]) == "each rank's own, and their mean is right"
    assert of(one, ranks=[one, one]) is None


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ((1, 0, 1, 1), "microbatch 1 missing"),
        ((0, 0, 0, 1), "microbatch 3 alone"),
        ((1, 1, 2, 1), "microbatch 2, 2 times"),
        ((2, 2, 0, 0), "microbatch 0 and microbatch 1 alone, 2 times"),
        ((0.25, 0.25, 0.25, 0.25), "a scale: 0.25 times"),
        ((1, 2, 3, 4), None),
    ],
)
def test_microbatches_in_a_sum(counts: tuple[float, ...], kind: str | None) -> None:
    assert summed(*counts) == kind


def test_parts_that_look_alike_explain_nothing() -> None:
    alike = {"microbatch 0": RIGHT / 2, "microbatch 1": RIGHT / 2}
    assert of(RIGHT.roll(1, 0), parts=alike) is None


def test_three_numbers_may_be_anything() -> None:
    assert kind_of(torch.ones(2), torch.full((2,), 2.0), 1e-9) is None
