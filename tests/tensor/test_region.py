"""Random numbers inside and outside the sharded region. Ranks exchange nothing, so one process plays all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel.tensor.region import ShardedRegion

RANKS = range(4)
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


@on_devices
def test_dropout_differs_inside_and_agrees_outside(device: torch.device) -> None:
    masks = []
    for rank in RANKS:
        torch.manual_seed(0)
        region = ShardedRegion(rank, device)
        before = drop(ones(device))
        region.enter()
        inside = drop(ones(device))
        region.leave()
        masks.append((before, inside, drop(ones(device))))
    for rank in RANKS:
        for other in range(rank):
            assert torch.equal(masks[rank][0], masks[other][0])
            assert not torch.equal(masks[rank][1], masks[other][1])
            assert torch.equal(masks[rank][2], masks[other][2])


@on_devices
def test_however_much_is_drawn_inside_counts_as_one_number_outside(device: torch.device) -> None:
    after = []
    for count in (1, 2, 5):
        torch.manual_seed(0)
        region = ShardedRegion(1, device)
        region.enter()
        for _ in range(count):
            drop(ones(device))
        region.leave()
        after.append(state(device))
    assert all(torch.equal(after[0], s) for s in after)


@on_devices
def test_a_region_without_dropout_leaves_the_generator_as_it_was(device: torch.device) -> None:
    torch.manual_seed(0)
    before = state(device)
    region = ShardedRegion(1, device)
    region.enter()
    region.leave()
    assert torch.equal(state(device), before)


@on_devices
def test_each_entry_draws_other_numbers_and_the_same_seed_the_same(device: torch.device) -> None:
    def masks() -> list[Tensor]:
        torch.manual_seed(0)
        region = ShardedRegion(1, device)
        found = []
        for _ in range(3):  # nothing is drawn in between
            region.enter()
            found.append(drop(ones(device)))
            region.leave()
        return [*found, drop(ones(device))]

    first, again = masks(), masks()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(first[i], first[j]) for i in range(4) for j in range(i))


@on_devices
def test_entering_inside_and_leaving_outside_do_nothing(device: torch.device) -> None:
    region = ShardedRegion(1, device)
    outside = state(device)
    region.leave()
    region.close()
    assert torch.equal(state(device), outside)
    region.enter()
    drop(ones(device))
    inside = state(device)
    region.enter()
    assert torch.equal(state(device), inside)
    region.leave()
    outside = state(device)
    region.leave()
    assert torch.equal(state(device), outside)


@on_devices
def test_closing_leaves_the_region_and_frees_what_it_kept(device: torch.device) -> None:
    def outside_after(end: Callable[[ShardedRegion], None]) -> Tensor:
        torch.manual_seed(0)
        region = ShardedRegion(1, device)
        region.enter()
        drop(ones(device))
        end(region)
        return state(device)

    region = ShardedRegion(1, device)
    region.enter()
    region.close()
    assert not region._outside
    assert torch.equal(outside_after(ShardedRegion.close), outside_after(ShardedRegion.leave))


@on_devices
def test_reseeding_inside_ends_the_region(device: torch.device) -> None:
    region = ShardedRegion(1, device)
    region.enter()
    torch.manual_seed(5)
    seeded = state(device)
    region.leave()
    assert torch.equal(state(device), seeded)
    region.enter()
    assert not torch.equal(state(device), seeded)


# The parts of two blocks, cut into what is checkpointed: whole blocks; from inside the first block's region to inside
# the second's; one part each, so that regions are entered in one and left in another.
CUTS = {"whole": [0, 4, 8], "inside": [0, 1, 5, 8], "outside inside": [0, 2, 4, 6, 8], "each": list(range(9))}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@on_devices
def test_recomputation_draws_the_same_numbers(device: torch.device, cuts: list[int], reentrant: bool) -> None:
    def gradient(call: Callable[[Part, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        region = ShardedRegion(1, device)
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
        torch.manual_seed(0)
        region = ShardedRegion(1, device)
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


@on_devices
def test_the_loader_shuffles_alike_on_all_ranks_after_steps_with_regions(device: torch.device) -> None:
    orders = []
    for rank in RANKS:
        torch.manual_seed(0)
        region = ShardedRegion(rank, device)
        loader = DataLoader(list(range(100)), batch_size=10, shuffle=True)
        order = []
        for epoch in range(3):
            for batch in loader:
                order.append(batch.tolist())
                chain(block_parts(region) * 2, ones(device))
                if epoch == 1:
                    region.enter()  # a step that ends inside: an exception, or a column layer without its row layer
                    drop(ones(device))
                region.close()
        orders.append(order)
    assert all(order == orders[0] for order in orders)
    assert orders[0][:10] != orders[0][10:20]
