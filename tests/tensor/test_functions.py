"""The collectives: what they compute in both directions, for any size and layout, and what they leave alone.

All values are small integers, so that sums are exact in any order and in bfloat16 too: results are equal, not close.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.absent.tensor import AbsentTensor, absent_like
from lightning_parallel.tensor import functions
from tests.tensor.helpers import Messages, ranks, world
from tools.workers.pool import WorkerPool

# What a rank gets of all ranks' tensors.
MAPS: dict[str, Callable[[list[Tensor], int, int], Tensor]] = {
    "own": lambda xs, dim, rank: xs[rank],
    "sum": lambda xs, dim, rank: torch.stack(xs).sum(0),
    "joined": lambda xs, dim, rank: torch.cat(xs, dim),
    "piece": lambda xs, dim, rank: cut(xs[rank], dim)[rank],
    "summed piece": lambda xs, dim, rank: cut(torch.stack(xs).sum(0), dim)[rank],
}
# Forward and backward, as in the table of functions.py.
FORMULAS = {
    "copy": ("own", "sum"),
    "reduce": ("sum", "own"),
    "reduce_": ("sum", "own"),
    "split": ("piece", "joined"),
    "gather": ("joined", "piece"),
    "reduce_scatter": ("summed piece", "joined"),
    "gather_sum": ("joined", "summed piece"),
}
EQUAL_INPUTS = ["copy", "split"]  # their input is the same on all ranks
PIECES = ["gather", "gather_sum"]  # their input is a piece


def integers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same on all ranks."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cut(whole: Tensor, dim: int) -> list[Tensor]:
    """Pieces for all ranks, as torch cuts; empty ones for the ranks that it leaves without."""
    count = dist.get_world_size()
    pieces = list(whole.chunk(count, dim))
    return pieces + [whole.narrow(dim, 0, 0)] * (count - len(pieces))


def call(name: str, x: Tensor, dim: int, size: int | None) -> Tensor:
    group = world()
    function = getattr(functions, name)
    if name in ("copy", "reduce"):
        return function(x, group)
    if name == "reduce_":
        return function(x.clone(), group)
    return function(x, dim, group, size) if name in PIECES else function(x, dim, group)


def layouts(x: Tensor) -> Iterator[Tensor]:
    """Tensors equal to ``x``, in the ways that views lie in memory."""
    yield x.clone()
    yield x.transpose(0, -1).clone().transpose(0, -1)
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    yield wide[..., ::2]


def all_keep_to_the_formulas() -> None:
    rank, count = dist.get_rank(), dist.get_world_size()
    # Even, uneven, and too few for all ranks.
    sizes = [(2 * count, torch.float64), (2 * count + 1, torch.bfloat16), (count - 1, torch.float64)]
    for name, (size, dtype) in product(FORMULAS, sizes):
        for dim, shape in ((1, (2, size, 3)), (-1, (3, size)), (0, (size,))):
            wholes = [integers(10 * size + r * (name not in EQUAL_INPUTS), shape, dtype) for r in range(count)]
            xs = cut(wholes[0], dim) if name in PIECES else wholes
            forward, backward = (MAPS[each] for each in FORMULAS[name])
            ys = [forward(xs, dim, r) for r in range(count)]
            gs = [integers(100 * size + r, tuple(y.shape), dtype) for r, y in enumerate(ys)]
            for x, g in zip(layouts(xs[rank]), layouts(gs[rank]), strict=True):
                x.requires_grad_()
                versions = x._version, g._version
                y = call(name, x, dim, size)
                (grad,) = torch.autograd.grad(y, x, g)
                assert y.dtype == grad.dtype == dtype
                assert torch.equal(y, ys[rank]) and torch.equal(grad, backward(gs, dim, rank)), (name, dim, shape)
                assert torch.equal(x, xs[rank]) and torch.equal(g, gs[rank])
                assert (x._version, g._version) == versions


def test_forward_and_backward_keep_to_the_formulas_and_write_to_no_input(pool: WorkerPool) -> None:
    pool.run(all_keep_to_the_formulas, 3)


@pytest.mark.parametrize("name", FORMULAS)
def test_one_rank_gets_its_own_tensor_back(name: str) -> None:
    x = torch.ones(4, 2, requires_grad=True)
    arguments = (ranks(1),) if name in ("copy", "reduce", "reduce_") else (0, ranks(1))
    assert getattr(functions, name)(x, *arguments) is x


WITHOUT_MEMORY: list[Callable[[tuple[int, ...]], Tensor]] = [
    lambda shape: absent_like(torch.empty(shape), "somewhere else").requires_grad_(),
    lambda shape: torch.empty(shape, device="meta", requires_grad=True),
    lambda shape: torch.empty((*shape, 0), requires_grad=True),
]


def without_memory() -> None:
    mine = 3 - dist.get_rank()  # of five rows
    for make, name in product(WITHOUT_MEMORY, FORMULAS):
        x = make((mine if name in PIECES else 5, 3))
        with Messages() as sent:
            y = call(name, x, 0, 5)
            torch.autograd.backward(y, y.detach())
        assert not sent.sent, name
        assert y.shape[:2] == (mine if name in ("split", "reduce_scatter") else 5, 3), name
        grad = x.grad
        assert grad is not None and grad.shape == x.shape
        assert y.dtype == x.dtype and y.device == grad.device == x.device
        assert type(y) is type(grad) is type(x) or not isinstance(x, AbsentTensor), name


def memory_is_taken_once() -> None:
    """A piece doesn't keep the whole. To reduce in place takes none, and is noticed by who needs the input."""
    group, whole = world(), torch.arange(8.0).view(4, 2)
    half = call("split", whole, 0, None)
    assert half.untyped_storage().nbytes() == half.nbytes
    x = torch.ones(3, 2, requires_grad=True)
    y = x * 2
    before = y.data_ptr()
    assert functions.reduce_(y, group).data_ptr() == before
    z = functions.reduce_(x.exp(), group)  # which needs its result in the backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_nothing_is_sent_or_kept_that_needs_not_be(pool: WorkerPool) -> None:
    pool.run(without_memory, 2)
    pool.run(memory_is_taken_once, 2)
