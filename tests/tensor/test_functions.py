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

DTYPES = [torch.float64, torch.bfloat16]
NAMES = ["copy", "reduce", "reduce_", "split", "gather", "reduce_scatter", "gather_sum"]
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


def forward_formula(name: str, xs: list[Tensor], dim: int, rank: int) -> Tensor:
    total = torch.stack(xs).sum(0) if name.startswith("reduce") else xs[0]
    joined = torch.cat(xs, dim)
    return {
        "copy": lambda: xs[0],
        "reduce": lambda: total,
        "reduce_": lambda: total,
        "split": lambda: cut(xs[0], dim)[rank],
        "gather": lambda: joined,
        "reduce_scatter": lambda: cut(total, dim)[rank],
        "gather_sum": lambda: joined,
    }[name]()


def backward_formula(name: str, gs: list[Tensor], dim: int, rank: int) -> Tensor:
    return {
        "copy": lambda: torch.stack(gs).sum(0),
        "reduce": lambda: gs[rank],
        "reduce_": lambda: gs[rank],
        "split": lambda: torch.cat(gs, dim),
        "gather": lambda: cut(gs[rank], dim)[rank],
        "reduce_scatter": lambda: torch.cat(gs, dim),
        "gather_sum": lambda: cut(torch.stack(gs).sum(0), dim)[rank],
    }[name]()


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
    for name, dtype, size in product(NAMES, DTYPES, (2 * count, 2 * count + 1, count - 1)):
        for dim, shape in ((0, (size, 3)), (1, (2, size, 3)), (-1, (3, size)), (0, (size,))):
            wholes = [integers(10 * size + r * (name not in EQUAL_INPUTS), shape, dtype) for r in range(count)]
            xs = cut(wholes[0], dim) if name in PIECES else wholes
            ys = [forward_formula(name, xs, dim, r) for r in range(count)]
            gs = [integers(100 * size + r, tuple(y.shape), dtype) for r, y in enumerate(ys)]
            for x, g in zip(layouts(xs[rank]), layouts(gs[rank]), strict=True):
                x.requires_grad_()
                versions = x._version, g._version
                y = call(name, x, dim, size)
                assert y.dtype == dtype
                assert torch.equal(y, ys[rank]), (name, dim, shape)
                (grad,) = torch.autograd.grad(y, x, g)
                assert grad.dtype == dtype
                assert torch.equal(grad, backward_formula(name, gs, dim, rank)), (name, dim, shape)
                assert torch.equal(x, xs[rank]) and torch.equal(g, gs[rank])
                assert (x._version, g._version) == versions


def test_forward_and_backward_keep_to_the_formulas_and_write_to_no_input(pool: WorkerPool) -> None:
    pool.run(all_keep_to_the_formulas, 3)


def expanded_gradients() -> None:
    """A gradient that is one number, expanded, is summed in memory of its own."""
    for name in NAMES:
        x = torch.ones(4, 2, requires_grad=True)
        call(name, x, 0, None).sum().backward()  # one number, seen as many
        factor = dist.get_world_size() if name in ("copy", "gather_sum") else 1
        assert x.grad is not None and torch.equal(x.grad, torch.full((4, 2), float(factor))), name


def second_derivatives() -> None:
    """They are refused."""
    for name in NAMES:
        x = torch.ones(4, 2, requires_grad=True)
        (grad,) = torch.autograd.grad(call(name, x, 0, None).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice.*once_differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_gets_its_own_tensor_back(name: str) -> None:
    group = ranks(1)
    x = torch.ones(4, 2, requires_grad=True)
    function = getattr(functions, name)
    assert (function(x, group) if name in ("copy", "reduce", "reduce_") else function(x, 0, group)) is x


def absent(shape: tuple[int, ...]) -> Tensor:
    return absent_like(torch.empty(shape), "somewhere else").requires_grad_()


def on_meta(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, device="meta", requires_grad=True)


def empty(shape: tuple[int, ...]) -> Tensor:
    return torch.empty((*shape, 0), requires_grad=True)


def without_memory(make: Callable[[tuple[int, ...]], Tensor]) -> None:
    count = dist.get_world_size()
    shapes: dict[str, tuple[int, ...]] = {"split": (2, 3), "reduce_scatter": (2, 3), "gather": (5, 3)}
    shapes["gather_sum"] = shapes["gather"]
    for name in NAMES:
        x = make((3 if dist.get_rank() == 0 else 2, 3) if name in PIECES else (5, 3))
        with Messages() as sent:
            y = call(name, x, 0, 5)
            torch.autograd.backward(y, y.detach())
        assert not sent.sent, name
        grad = x.grad
        assert grad is not None
        rows, columns = shapes.get(name, (5, 3))
        rows = 3 if rows == 2 and dist.get_rank() == 0 else rows
        assert y.shape[:2] == (rows, columns) and y.dtype == x.dtype, (name, y.shape, count)
        assert grad.shape == x.shape and y.device == grad.device == x.device
        assert type(y) is type(grad) is type(x) or not isinstance(x, AbsentTensor), name


@pytest.mark.parametrize("make", [absent, on_meta, empty])
def test_tensors_without_memory_get_their_shapes_and_send_nothing(
    pool: WorkerPool, make: Callable[[tuple[int, ...]], Tensor]
) -> None:
    pool.run(without_memory, 2, make)


def pieces_alone() -> None:
    """A piece doesn't keep the whole in memory."""
    whole = torch.arange(8.0).view(4, 2)
    y = call("split", whole, 0, None)
    assert y.untyped_storage().nbytes() == y.numel() * y.element_size()
    y += 1
    assert torch.equal(whole, torch.arange(8.0).view(4, 2))


def reduced_in_place() -> None:
    """It takes no memory, and is noticed by who needs the input."""
    group = world()
    x = torch.ones(3, 2, requires_grad=True)
    y = x * 2
    before = y.data_ptr()
    z = functions.reduce_(y, group)
    assert z.data_ptr() == before and torch.equal(z, torch.full((3, 2), 4.0))
    z.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 2.0))  # type: ignore[arg-type]

    z = functions.reduce_(x.exp(), group)  # which needs its result in the backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("what", [expanded_gradients, second_derivatives, pieces_alone, reduced_in_place])
def test_functions_keep_to_what_they_promise(pool: WorkerPool, what: Callable[[], None]) -> None:
    pool.run(what, 2)
