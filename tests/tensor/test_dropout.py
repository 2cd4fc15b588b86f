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

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES, ids=str)
Part = Callable[[Tensor], Tensor]


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def block_parts(region: ShardedRegion) -> list[Part]:
    """A column layer, dropout inside the region, a row layer, dropout outside."""

    def column(x: Tensor) -> Tensor:
        y = x.sin()
        region.enter()
        return y

    def row(x: Tensor) -> Tensor:
        region.leave()
        return x.cos()

    return [column, drop, row, drop]


def chain(parts: list[Part], x: Tensor) -> Tensor:
    for part in parts:
        x = part(x)
    return x


def ones(device: torch.device) -> Tensor:
    return torch.ones(64, device=device)


def state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def seeded(device: torch.device, rank: int = 1) -> ShardedRegion:
    torch.manual_seed(0)
    return ShardedRegion(rank, device)


@on_devices
def test_dropout_differs_between_ranks_inside_and_agrees_outside(device: torch.device) -> None:
    masks = []
    for rank in (*range(4), 0):
        region = seeded(device, rank)
        outside, inside = [drop(ones(device))], []
        for _ in range(2):  # nothing is drawn in between
            region.enter()
            inside.append(drop(ones(device)))
            region.leave()
        outside.append(drop(ones(device)))
        masks.append((outside, inside))
    assert not any(torch.equal(*inside) for _, inside in masks)
    for rank, (outside, inside) in enumerate(masks):
        for other in range(rank):
            assert all(map(torch.equal, outside, masks[other][0]))
            same_rank = (rank, other) == (4, 0)
            assert all(torch.equal(a, b) == same_rank for a, b in zip(inside, masks[other][1], strict=True))


@on_devices
def test_however_much_is_drawn_inside_counts_as_one_number_outside_and_nothing_as_none(device: torch.device) -> None:
    after = []
    for count, end in ((1, ShardedRegion.leave), (2, ShardedRegion.leave), (5, ShardedRegion.close)):
        region = seeded(device)
        region.enter()
        for _ in range(count):
            drop(ones(device))
        end(region)
        after.append(state(device))
    assert all(torch.equal(after[0], each) for each in after)
    region = seeded(device)
    before = state(device)
    region.enter()
    region.close()
    assert torch.equal(state(device), before) and not region._outside


# The parts of two blocks, cut into what is checkpointed: whole blocks; from inside the first block's region to inside
# the second's; one part each, so that regions are entered in one and left in another.
CUTS = {"whole": [0, 4, 8], "inside": [0, 1, 5, 8], "outside inside": [0, 2, 4, 6, 8], "each": list(range(9))}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@on_devices
def test_recomputation_draws_the_same_numbers(device: torch.device, cuts: list[int], reentrant: bool) -> None:
    def gradient(call: Callable[[Part, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        region = seeded(device)
        x = torch.linspace(0, 1, 64, device=device, requires_grad=True)
        parts = block_parts(region) + block_parts(region)
        y: Tensor = x
        for start, stop in zip(cuts, cuts[1:], strict=False):
            y = call(partial(chain, parts[start:stop]), y)
        y.sum().backward()
        region.close()
        assert x.grad is not None
        return y.detach(), x.grad, state(device)

    plain = gradient(lambda part, x: part(x))
    recomputed = gradient(lambda part, x: checkpoint(part, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@on_devices
def test_a_recomputation_broken_off_inside_does_not_reach_the_next(device: torch.device) -> None:
    """What the row layer does needs no recomputation: it stops after the dropout, with the region entered."""

    def gradient(call: Callable[[Part, Tensor], Tensor]) -> Tensor:
        region = seeded(device)
        x = torch.linspace(0, 1, 64, device=device, requires_grad=True)

        def block(x: Tensor) -> Tensor:
            region.enter()
            y = drop(x.sin())
            region.leave()
            return y + x

        call(block, call(block, call(block, x))).sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient(lambda part, x: part(x))
    assert torch.equal(plain, gradient(lambda part, x: checkpoint(part, x, use_reentrant=False)))
