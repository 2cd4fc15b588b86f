"""Divided layers: a table's numbers, what is sent and kept, and that more than a plain layer is refused. The numbers of
linear layers are in strategies/test_tensor.py."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_parallel.tensor import functions
from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.layer import ParallelLayer, Site
from lightning_parallel.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from lightning_parallel.tensor_plans.sharding import shard_module
from tests.pipeline.nets import Calls
from tests.tensor.helpers import Messages, ranks, world
from tools.workers.pool import WorkerPool

# -- numbers -----------------------------------------------------------------------------------------------------


def equals_the_whole_table(device: str) -> None:
    vocabulary = 7
    ids = torch.randint(vocabulary, (3, 5), device=device)
    ids[0] = torch.tensor([0, 6, 6, 0, 2])  # the same row several times, and both ends
    upstream = torch.randn(3, 5, 4, dtype=torch.float64, device=device)
    for padding in (None, 0, 2, 6, -2):
        torch.manual_seed(3)
        whole = nn.Embedding(vocabulary, 4, padding, dtype=torch.float64, device=device)
        nn.init.normal_(whole.weight)  # the padding row, too: it is looked up as any other
        layer = VocabParallelEmbedding(whole, world())
        take = layer.shards["weight"].take
        assert torch.equal(layer.weight, take(whole.weight))
        for shape in (ids, ids[0, 0], ids[:0], ids.t(), ids.int()):
            assert torch.equal(layer(shape), whole(shape))  # one rank's row plus zeros: nothing is rounded
        whole(ids).backward(upstream)
        layer(ids).backward(upstream)
        assert whole.weight.grad is not None
        torch.testing.assert_close(layer.weight.grad, take(whole.weight.grad), rtol=1e-12, atol=1e-12)
    for wrong in (-1, -vocabulary, vocabulary, 10 * vocabulary) if device == "cpu" else ():
        with pytest.raises(IndexError):
            layer(torch.tensor([[0, wrong]]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_divided_table_equals_the_whole_one(pool: WorkerPool, device: str) -> None:
    pool.run(equals_the_whole_table, 3, device)


def attention(m: Any, x: Tensor, other: Tensor | None = None) -> Tensor:
    """q, k and v of one tensor; of another one if there is one (cross-attention)."""
    source = x if other is None else other
    return m.o(m.q(x).tanh() * m.k(source).sigmoid() + m.v(source))  # type: ignore[no-any-return]


PLAN = dict.fromkeys("qkv", "column") | {"o": "row"}


def compare(cross: bool) -> tuple[list[str], bool]:
    """All-reduces of a backward, after comparing its gradients with the whole model's; and whether the inputs have been
    freed with the graph, once all layers have been called."""
    group = world()
    torch.manual_seed(0)
    whole = Calls(attention, **{name: nn.Linear(6, 4) for name in "qkv"}, o=nn.Linear(4, 6)).double()
    model = copy.deepcopy(whole)
    sharding = shard_module(model, PLAN, group)
    held = []
    for _ in range(2):
        inputs = [torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(1 + cross)]
        held += [weakref.ref(x) for x in inputs]
        expected = torch.autograd.grad(whole(*inputs).square().sum(), [*inputs, *whole.parameters()])
        loss = model(*inputs).square().sum()
        with Messages() as messages:
            found = torch.autograd.grad(loss, [*inputs, *model.parameters()])
        names = [None] * len(inputs) + [name for name, _ in whole.named_parameters()]
        for name, one, other in zip(names, expected, found, strict=True):
            shard = sharding.shards.get(name or "")
            assert float(((one if shard is None else shard.take(one)) - other).abs().max()) < 1e-12, name
    del inputs, loss
    gc.collect()
    return messages.sent, all(x() is None for x in held)


@pytest.mark.parametrize("cross", [False, True])
def test_each_input_s_gradient_is_sent_once_and_the_shared_copy_is_let_go(pool: WorkerPool, cross: bool) -> None:
    assert pool.run(compare, 2, cross) == [(["allreduce_"] * (1 + cross), True)] * 2


def bias_alone_and_second_derivatives() -> None:
    whole = nn.Linear(4, 4)
    whole.weight.requires_grad_(False)
    layer = ColumnParallelLinear(whole, world())
    layer(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert layer.bias is not None and layer.bias.grad is not None and layer.bias.grad.tolist() == [3.0, 3.0]

    column = ColumnParallelLinear(nn.Linear(4, 4), world())
    row = RowParallelLinear(nn.Linear(8, 4), world())
    x = torch.ones(2, 4, requires_grad=True)
    for gradient_depends in (False, True):  # on x: without, the result would be a constant, without a word
        y = column(x).square() if gradient_depends else column(x)
        with pytest.raises(RuntimeError, match="ColumnParallelLinear has no second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(row(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_a_bias_learns_where_its_weight_is_frozen_and_second_derivatives_are_refused(pool: WorkerPool) -> None:
    pool.run(bias_alone_and_second_derivatives, 2)


# -- messages, and what is kept ----------------------------------------------------------------------------------


def layers_and_inputs() -> dict[str, tuple[ParallelLinear, int]]:
    """Layers in all ways, and how many features they take here."""
    first, second, alone, pieces = nn.Linear(4, 6), nn.Linear(8, 6), Site(world()), Site(world(), in_block=True)
    return {
        "column": (ColumnParallelLinear(first, alone), 4),
        "column, gathered": (ColumnParallelLinear(first, world(), gather_output=True), 4),
        "column, in a block on pieces": (ColumnParallelLinear(first, pieces), 4),
        "row": (RowParallelLinear(second, alone), 4),
        "row, splits": (RowParallelLinear(second, world(), input_is_parallel=False), 8),
        "row, in a block on pieces": (RowParallelLinear(second, pieces), 4),
    }


def messages() -> dict[str, list[list[str]]]:
    """Those of a forward and a backward, and of both where the input is data."""
    found: dict[str, list[list[str]]] = {}
    for name, (layer, size) in layers_and_inputs().items():
        for wanted in (True, False):
            with Messages() as forward:
                y = layer(torch.ones(1, 2, size, requires_grad=wanted))
            with Messages() as backward:
                y.sum().backward()
            found.setdefault(name, []).extend([forward.sent, backward.sent])
    return found


def test_a_layer_sends_one_message_in_the_direction_that_needs_it(pool: WorkerPool) -> None:
    reduced, joined, scattered = ["allreduce_"], ["_allgather_base_"], ["_reduce_scatter_base_"]
    assert pool.run(messages, 2)[0] == {
        "column": [[], reduced, [], []],
        "column, gathered": [joined, reduced, joined, []],
        "column, in a block on pieces": [[], [], [], []],
        "row": [reduced, [], reduced, []],
        "row, splits": [reduced, joined, reduced, []],
        "row, in a block on pieces": [scattered, joined, scattered, joined],
    }


def test_a_frozen_weight_keeps_no_input_and_a_copy_that_shares_memory_may_not_be_changed_in_place() -> None:
    for trains in (True, False):
        layer = ColumnParallelLinear(nn.Linear(4, 4).requires_grad_(trains), Site(ranks(2)))
        hidden = layer(torch.ones(2, 4, requires_grad=True))
        assert (hidden.grad_fn.saved_tensors[0] is None) == (not trains)
    x = torch.ones(3, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="in-?place"):  # else the gradients of other uses of x would be wrong
        functions.copy(x, ranks(2)).relu_()


# -- refusals ----------------------------------------------------------------------------------------------------


class Clamped(nn.Linear):
    """Computes the same for small values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1e3, 1e3)


def changed(change: Callable[[nn.Module], object], kind: Callable[..., nn.Module] = nn.Linear) -> Callable[[], Any]:
    def make() -> nn.Module:
        layer = kind(4, 4)
        change(layer)
        return layer

    return make


LINEAR, TABLE = ColumnParallelLinear, VocabParallelEmbedding
HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_hook", "state_dict_post_hook", "load_state_dict_pre_hook")
OTHERS: list[tuple[type[ParallelLayer], str, Callable[[], Any]]] = [
    *(
        (LINEAR, "Linear .*hooks", changed(lambda x, hook=hook: getattr(x, f"register_{hook}")(lambda *_, **__: None)))  # type: ignore[misc]
        for hook in HOOKS
    ),
    (LINEAR, "parametrization", changed(parametrizations.weight_norm)),
    (LINEAR, "forward replaced", changed(lambda layer: setattr(layer, "forward", torch.relu))),
    (LINEAR, r"\(scale\)", changed(lambda layer: layer.register_buffer("scale", torch.ones(())))),
    (LINEAR, "hooks", lambda: nn.LazyLinear(4)),
    (LINEAR, "MultiheadAttention", lambda: nn.MultiheadAttention(4, 2).out_proj),
    (LINEAR, "type int .* not nn.Linear", lambda: 8),
    (LINEAR, "Clamped .* forward of its own", lambda: Clamped(4, 4)),
    (LINEAR, "of 4 can't be divided over 5 tensor ranks", lambda: nn.Linear(4, 4)),
    (TABLE, "hooks", changed(lambda layer: layer.register_forward_pre_hook(lambda *_: None), nn.Embedding)),
    (TABLE, "EmbeddingBag .* is not nn.Embedding", lambda: nn.EmbeddingBag(4, 2)),
    (TABLE, "max_norm=1.0", lambda: nn.Embedding(4, 2, max_norm=1.0)),
    (TABLE, "scale_grad_by_freq", lambda: nn.Embedding(4, 2, scale_grad_by_freq=True)),
    (TABLE, "sparse", lambda: nn.Embedding(4, 2, sparse=True)),
]


@pytest.mark.parametrize(("kind", "problem", "make"), OTHERS)
def test_another_layer_or_one_that_is_more_than_plain_is_refused_by_name(
    kind: Callable[..., ParallelLayer], problem: str, make: Callable[[], Any]
) -> None:
    with pytest.raises(ValueError, match=problem):
        kind(make(), Site(ranks(5)))


def test_hooks_on_outputs_stay_on_a_table() -> None:
    seen, table = list[Tensor](), nn.Embedding(4, 4)
    table.register_forward_hook(lambda layer, args, output: seen.append(output))
    output = TABLE(table, Site(ranks(1)))(torch.tensor([0]))
    assert len(seen) == 1 and seen[0] is output


def test_there_is_no_pickle() -> None:
    with pytest.raises(TypeError, match=r"can't be pickled: .* state_dict\(\)"):
        pickle.dumps(LINEAR(nn.Linear(4, 4), Site(ranks(2))))
