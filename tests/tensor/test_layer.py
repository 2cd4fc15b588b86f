"""What all divided layers share: an input's gradient is sent once, and more than a plain layer is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_parallel.interception import Interception
from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.layer import ParallelLayer, Site
from lightning_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from lightning_parallel.tensor_plans.sharding import shard_module
from tests.tensor.helpers import Messages, ranks, world
from tools.workers.pool import WorkerPool


class Attention(nn.Module):
    """q, k and v of one tensor; of another one if there is one (cross-attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 4) for _ in range(3))
        self.o = nn.Linear(4, 6)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        source = x if other is None else other
        result: Tensor = self.o(self.q(x).tanh() * self.k(source).sigmoid() + self.v(source))
        return result


PLAN = dict.fromkeys("qkv", "column") | {"o": "row"}


def compare(cross: bool) -> tuple[int, bool]:
    """All-reduces of a backward, after comparing its gradients with the whole model's; and whether the inputs have been
    freed with the graph, once all layers have been called."""
    group = world()
    torch.manual_seed(0)
    whole = Attention().double()
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
    assert all("allreduce" in name for name, _ in messages.sent)
    del inputs, loss
    gc.collect()
    return len(messages.sent), all(x() is None for x in held)


@pytest.mark.parametrize(("cross", "sent"), [(False, 1), (True, 2)])
def test_each_input_s_gradient_is_sent_once_and_the_shared_copy_is_let_go(
    pool: WorkerPool, cross: bool, sent: int
) -> None:
    assert pool.run(compare, 2, cross) == [(sent, True)] * 2


@pytest.mark.parametrize("trains", [True, False])
def test_a_shard_is_a_parameter_like_the_whole(trains: bool) -> None:
    whole = nn.Linear(3, 4, dtype=torch.bfloat16).requires_grad_(trains)
    vars(whole.weight)["decay"] = 0.1
    part = ColumnParallelLinear(whole, Site(ranks(2, 1))).weight
    assert isinstance(part, nn.Parameter) and part.is_leaf
    assert (part.requires_grad, part.dtype, vars(part)["decay"]) == (trains, torch.bfloat16, 0.1)
    assert torch.equal(part, whole.weight[2:])


def test_a_copy_stands_in_the_same_place_without_interceptions_and_there_is_no_pickle() -> None:
    layer = ColumnParallelLinear(nn.Linear(4, 4), Site(ranks(2)))
    Interception().before(layer, lambda *_: None)
    duplicate = copy.deepcopy(layer)
    assert duplicate.site is layer.site and torch.equal(duplicate.weight, layer.weight)
    assert layer._forward_pre_hooks and not duplicate._forward_pre_hooks
    with pytest.raises(TypeError, match=r"can't be pickled: .* state_dict\(\)"):
        pickle.dumps(layer)


# -- refusals ----------------------------------------------------------------------------------------------------


class Clamped(nn.Linear):
    """Computes the same for small values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1e3, 1e3)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


LINEAR, TABLE = (ColumnParallelLinear, RowParallelLinear), (VocabParallelEmbedding,)
HOOKS = (
    "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_post_hook", "state_dict_pre_hook",
    "load_state_dict_pre_hook", "load_state_dict_post_hook",
)  # fmt: skip
MORE: list[tuple[str, Callable[[nn.Module], object]]] = [
    *(("hooks", lambda x, hook=hook: getattr(x, f"register_{hook}")(lambda *_, **__: None)) for hook in HOOKS),  # type: ignore[misc]
    ("parametrization", parametrizations.weight_norm),
    ("forward replaced", lambda layer: setattr(layer, "forward", torch.relu)),
    (r"\(scale\)", lambda layer: layer.register_buffer("scale", torch.ones(()))),
]


@pytest.mark.parametrize(("problem", "change"), MORE)
def test_a_layer_that_is_more_than_plain_is_refused_by_name(
    problem: str, change: Callable[[nn.Module], object]
) -> None:
    for kind, plain in (*((kind, nn.Linear) for kind in LINEAR), *((kind, nn.Embedding) for kind in TABLE)):
        layer = plain(4, 4)
        change(layer)
        with pytest.raises(ValueError, match=f"{type(layer).__name__} .*{problem}"):
            kind(layer, Site(ranks(2)))


def test_hooks_on_outputs_stay_on_a_table_only() -> None:
    seen: list[str] = []
    layers = {LINEAR[0]: nn.Linear(4, 4), LINEAR[1]: nn.Linear(4, 4), TABLE[0]: nn.Embedding(4, 4)}
    for kind, layer in layers.items():
        layer.register_forward_hook(lambda layer, args, output: seen.append(type(layer).__name__))
        if kind in LINEAR:
            with pytest.raises(ValueError, match="hooks"):
                kind(layer, Site(ranks(2)))
    VocabParallelEmbedding(layers[TABLE[0]], Site(ranks(1)))(torch.tensor([0]))
    assert seen == ["VocabParallelEmbedding"]


OTHERS: list[tuple[tuple[type[ParallelLayer], ...], str, Callable[[], nn.Module]]] = [
    (LINEAR, "hooks", lambda: nn.LazyLinear(4)),
    (LINEAR, "MultiheadAttention", lambda: nn.MultiheadAttention(4, 2).out_proj),
    (LINEAR, "not nn.Linear", lambda: nn.Embedding(4, 4)),
    (LINEAR, "not nn.Linear", lambda: nn.Conv1d(4, 4, 1)),
    (LINEAR, "Clamped .* forward of its own", lambda: Clamped(4, 4)),
    (LINEAR, "of 4 can't be divided over 5 tensor ranks", lambda: nn.Linear(4, 4)),
    (TABLE, "EmbeddingBag .* is not nn.Embedding", lambda: nn.EmbeddingBag(4, 2)),
    (TABLE, "max_norm=1.0", lambda: nn.Embedding(4, 2, max_norm=1.0)),
    (TABLE, "scale_grad_by_freq", lambda: nn.Embedding(4, 2, scale_grad_by_freq=True)),
    (TABLE, "sparse", lambda: nn.Embedding(4, 2, sparse=True)),
    (TABLE, "Scaled .* forward of its own", lambda: Scaled(4, 2)),
    (TABLE, "of 4 can't be divided over 5 tensor ranks", lambda: nn.Embedding(4, 2)),
]


@pytest.mark.parametrize(("kinds", "problem", "make"), OTHERS)
def test_another_layer_is_refused_by_name(
    kinds: tuple[type[ParallelLayer], ...], problem: str, make: Callable[[], nn.Module]
) -> None:
    for kind in kinds:
        with pytest.raises(ValueError, match=problem):
            kind(make(), Site(ranks(5)))
