"""Divided linear layers: few messages, and what they don't keep. Their numbers are in strategies/test_tensor.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_parallel.tensor import functions
from lightning_parallel.tensor.layer import Site
from lightning_parallel.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from tests.tensor.helpers import Messages, close, ranks, values, world
from tools.workers.pool import WorkerPool

IN, HIDDEN, OUT = 6, 10, 7


def linear(seed: int, inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs).double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(values(10 * seed + i, *parameter.shape) * 0.3)
    return layer


def same_gradients(layer: ParallelLinear, whole: nn.Module) -> None:
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert gradients.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        expected = gradients[name]
        if expected is not None and name in layer.shards:
            expected = layer.shards[name].take(expected)
        close(parameter.grad, expected, name)


def frozen_weights() -> None:
    """They get no gradient, keep no input, and let the input's gradient through."""
    for names in (["weight"], ["bias"], ["weight", "bias"]):
        first, second = linear(1, IN, HIDDEN), linear(2, HIDDEN, OUT)
        for whole in (first, second):
            for name in names:
                getattr(whole, name).requires_grad_(False)
        column = ColumnParallelLinear.from_linear(first, group=world())
        row = RowParallelLinear.from_linear(second, group=world())
        x, whole_x = values(1, 5, IN).requires_grad_(), values(1, 5, IN).requires_grad_()
        hidden = column(x)
        assert (hidden.grad_fn.saved_tensors[0] is None) == ("weight" in names)
        row(torch.tanh(hidden)).square().sum().backward()
        second(torch.tanh(first(whole_x))).square().sum().backward()
        close(x.grad, whole_x.grad)
        for layer, whole in ((column, first), (row, second)):
            assert all(p.requires_grad == (name not in names) for name, p in layer.named_parameters())
            same_gradients(layer, whole)


def second_derivatives() -> None:
    """They are refused."""
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


@pytest.mark.parametrize("what", [frozen_weights, second_derivatives])
def test_layers_keep_to_what_they_promise(pool: WorkerPool, what: Callable[[], None]) -> None:
    pool.run(what, 2)


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
