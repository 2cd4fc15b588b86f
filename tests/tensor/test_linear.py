"""Divided linear layers: few messages, and what they don't keep. Their numbers are in strategies/test_tensor.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.tensor import functions
from lightning_parallel.tensor.layer import Site
from lightning_parallel.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from tests.tensor.helpers import Messages, ranks, world
from tools.workers.pool import WorkerPool


def second_derivatives() -> None:
    column = ColumnParallelLinear.from_linear(nn.Linear(4, 4), group=world())
    row = RowParallelLinear.from_linear(nn.Linear(8, 4), group=world())
    x = torch.ones(2, 4, requires_grad=True)
    for gradient_depends in (False, True):  # on x: without, the result would be a constant, without a word
        y = column(x).square() if gradient_depends else column(x)
        with pytest.raises(RuntimeError, match="ColumnParallelLinear has no second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(row(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def bias_alone() -> None:
    whole = nn.Linear(4, 4)
    whole.weight.requires_grad_(False)
    layer = ColumnParallelLinear.from_linear(whole, group=world())
    layer(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert layer.bias is not None and layer.bias.grad is not None and layer.bias.grad.tolist() == [3.0, 3.0]


def test_a_bias_learns_where_its_weight_is_frozen(pool: WorkerPool) -> None:
    pool.run(bias_alone, 2)


def test_second_derivatives_are_refused(pool: WorkerPool) -> None:
    pool.run(second_derivatives, 2)


@pytest.mark.parametrize("trains", [True, False])
def test_a_frozen_weight_keeps_no_input(trains: bool) -> None:
    layer = ColumnParallelLinear(nn.Linear(4, 4).requires_grad_(trains), Site(ranks(2)))
    hidden = layer(torch.ones(2, 4, requires_grad=True))
    assert (hidden.grad_fn.saved_tensors[0] is None) == (not trains)


def test_a_copy_that_shares_memory_may_not_be_changed_in_place() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="in-?place"):  # else the gradients of other uses of x would be wrong
        functions.copy(x, ranks(2)).relu_()


# -- messages ----------------------------------------------------------------------------------------------------


def layers_and_inputs() -> dict[str, tuple[ParallelLinear, int]]:
    """Layers in all ways, and how many features they take here."""
    first, second, alone, pieces = nn.Linear(4, 6), nn.Linear(8, 6), Site(world()), Site(world(), in_block=True)
    return {
        "column": (ColumnParallelLinear(first, alone), 4),
        "column, gathered": (ColumnParallelLinear.from_linear(first, group=world(), gather_output=True), 4),
        "column, in a block on pieces": (ColumnParallelLinear(first, pieces), 4),
        "row": (RowParallelLinear(second, alone), 4),
        "row, splits": (RowParallelLinear.from_linear(second, group=world(), input_is_parallel=False), 8),
        "row, in a block on pieces": (RowParallelLinear(second, pieces), 4),
    }


def messages() -> dict[str, list[list[str]]]:
    found = {}
    for name, (layer, size) in layers_and_inputs().items():
        for wanted in (True, False):
            with Messages() as forward:
                y = layer(torch.ones(1, 2, size, requires_grad=wanted))
            with Messages() as backward:
                y.sum().backward()
            found[name if wanted else f"{name}, data"] = [[n for n, _ in each.sent] for each in (forward, backward)]
    return found


def test_a_layer_sends_one_message_in_the_direction_that_needs_it(pool: WorkerPool) -> None:
    reduced, joined, scattered = ["allreduce_"], ["_allgather_base_"], ["_reduce_scatter_base_"]
    assert pool.run(messages, 2)[0] == {
        "column": [[], reduced],
        "column, data": [[], []],
        "column, gathered": [joined, reduced],
        "column, gathered, data": [joined, []],
        "column, in a block on pieces": [[], []],
        "column, in a block on pieces, data": [[], []],
        "row": [reduced, []],
        "row, data": [reduced, []],
        "row, splits": [reduced, joined],
        "row, splits, data": [reduced, []],
        "row, in a block on pieces": [scattered, joined],
        "row, in a block on pieces, data": [scattered, joined],
    }


# -- refusals ----------------------------------------------------------------------------------------------------


def test_outputs_of_several_parts_are_not_gathered() -> None:
    with pytest.raises(ValueError, match="gather_output=True"):
        ColumnParallelLinear.from_linear(nn.Linear(3, 8), group=ranks(2), parts=(4, 4), gather_output=True)


def test_a_layer_is_made_of_a_whole_one() -> None:
    with pytest.raises(ValueError, match="type int can't be divided over tensor ranks: it is not nn.Linear"):
        RowParallelLinear(8, Site(ranks(2)))
