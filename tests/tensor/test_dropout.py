"""Random numbers inside and outside the sharded region. Ranks exchange nothing, so one process plays all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_parallel.tensor.dropout import ShardedRegion

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
Part = Callable[[Tensor], Tensor]


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def seeded(device: str, rank: int = 1) -> ShardedRegion:
    torch.manual_seed(0)
    return ShardedRegion(rank, torch.device(device))


@on_devices
def test_dropout_differs_between_ranks_inside_and_agrees_outside(device: str) -> None:
    def drawn(rank: int) -> tuple[Tensor, list[Tensor]]:
        region, ones = seeded(device, rank), torch.ones(64, device=device)
        outside, inside = [drop(ones)], []
        for _ in range(2):  # nothing is drawn in between
            region.enter()
            inside.append(drop(ones))
            region.leave()
        return torch.cat([*outside, drop(ones)]), inside

    outside, inside = zip(*map(drawn, (0, 1, 2, 0)), strict=True)
    assert all(torch.equal(outside[0], other) for other in outside)
    assert all(map(torch.equal, inside[0], inside[3]))
    different = [mask for masks in inside[:3] for mask in masks]
    assert len({tuple(mask.tolist()) for mask in different}) == 6


@on_devices
def test_however_much_is_drawn_inside_counts_as_one_number_outside_and_nothing_as_none(device: str) -> None:
    after = []
    for count, end in ((1, ShardedRegion.leave), (5, ShardedRegion.close), (0, ShardedRegion.close)):
        region = seeded(device)
        before = state(device)
        region.enter()
        for _ in range(count):
            drop(torch.ones(64, device=device))
        end(region)
        after.append(state(device))
    assert torch.equal(after[0], after[1]) and not torch.equal(after[0], before)
    assert torch.equal(after[2], before) and not region._outside


# The parts of blocks (a column layer, dropout inside the region, a row layer, dropout outside), cut into what is
# checkpointed: whole blocks; from inside the first block's region to inside the second's; one part each, so that
# regions are entered in one and left in another. Or blocks that end with the row layer: as what that does needs no
# recomputation, one stops after the dropout, with the region entered, which must not reach the next.
CUTS = {
    "whole": (4, [0, 4, 8]), "inside": (4, [0, 1, 5, 8]), "outside inside": (4, [0, 2, 4, 6, 8]),
    "each": (4, [*range(9)]), "broken off": (3, [0, 3, 6, 9]),
}  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cuts", CUTS)
@on_devices
def test_recomputation_draws_the_same_numbers(device: str, cuts: str, reentrant: bool) -> None:
    length, ends = CUTS[cuts]

    def gradient(call: Callable[[Part, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        region = seeded(device)

        def column(x: Tensor) -> Tensor:
            y = x.sin()
            region.enter()
            return y

        def row(x: Tensor) -> Tensor:
            region.leave()
            return x.cos() if length == 4 else x + 1

        def chain(parts: list[Part], x: Tensor) -> Tensor:
            for part in parts:
                x = part(x)
            return x

        x = torch.linspace(0, 1, 64, device=device, requires_grad=True)
        parts, y = [column, drop, row, drop][:length] * 3, x
        for start, stop in zip(ends, ends[1:], strict=False):
            y = call(partial(chain, parts[start:stop]), y)
        y.sum().backward()
        region.close()
        assert x.grad is not None
        return y.detach(), x.grad, state(device)

    plain = gradient(lambda part, x: part(x))
    recomputed = gradient(lambda part, x: checkpoint(part, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
