"""The divided table equals the whole one: what it returns, its gradients, and how it starts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.layer import Site
from lightning_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from tests.pool import WorkerPool
from tests.tensor.helpers import close, ranks, world

# Vocabularies that the ranks divide, and others.
sizes = pytest.mark.parametrize(("world_size", "vocabulary"), [(1, 7), (2, 8), (3, 7)])


def equals_the_whole_table(vocabulary: int, device: str = "cpu") -> None:
    ids = torch.randint(vocabulary, (3, 5), device=device)
    ids[0] = torch.tensor([0, vocabulary - 1, vocabulary - 1, 0, 2])  # the same row several times, and both ends
    upstream = torch.randn(3, 5, 4, dtype=torch.float64, device=device)
    for padding in (None, 0, 2, vocabulary - 1, -2):
        torch.manual_seed(3)
        whole = nn.Embedding(vocabulary, 4, padding, dtype=torch.float64, device=device)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        layer = VocabParallelEmbedding(vocabulary, 4, padding, group=world(), dtype=torch.float64, device=device)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(layer.weight, layer.shards["weight"].take(whole.weight))
        nn.init.normal_(whole.weight)  # the padding row, too: it is looked up as any other
        layer = VocabParallelEmbedding.from_embedding(whole, group=world())
        for shape in (ids, ids[0], ids[0, 0], ids[:0], ids.t(), ids.int()):
            assert torch.equal(layer(shape), whole(shape))  # one rank's row plus zeros: nothing is rounded
        whole(ids).backward(upstream)
        layer(ids).backward(upstream)
        assert whole.weight.grad is not None
        close(layer.weight.grad, layer.shards["weight"].take(whole.weight.grad))
    for wrong in (-1, -vocabulary, -100, vocabulary, 10 * vocabulary) if device == "cpu" else ():
        with pytest.raises(IndexError):
            layer(torch.tensor([[0, wrong]]))


@sizes
def test_it_starts_as_the_whole_table_and_equals_it(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(equals_the_whole_table, world_size, vocabulary)


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_whole_table(pool: WorkerPool) -> None:
    pool.run(equals_the_whole_table, 3, 7, "cuda")


def is_tied_to_a_head() -> None:
    torch.manual_seed(1)
    table, head = nn.Embedding(7, 6, dtype=torch.float64), nn.Linear(6, 7, bias=False, dtype=torch.float64)
    head.weight = table.weight
    ids = torch.tensor([[0, 6, 3]])
    F.cross_entropy(head(table(ids))[0], ids[0]).backward()
    site = Site(world(), shared={})
    parallel_table = VocabParallelEmbedding.from_embedding(table, group=world(), site=site)
    parallel_head = ColumnParallelLinear.from_linear(head, group=world(), gather_output=True, site=site)
    assert parallel_head.weight is parallel_table.weight
    F.cross_entropy(parallel_head(parallel_table(ids))[0], ids[0]).backward()
    assert table.weight.grad is not None
    close(parallel_table.weight.grad, parallel_table.shards["weight"].take(table.weight.grad))
    clones = copy.deepcopy(nn.ModuleList([parallel_table, parallel_head]))
    assert clones[0].weight is clones[1].weight is not parallel_table.weight
    site = Site(world(), shared={})
    RowParallelLinear.from_linear(head, group=world(), site=site)
    with pytest.raises(ValueError, match="in two ways"):
        VocabParallelEmbedding.from_embedding(table, group=world(), site=site)


def test_it_stays_tied_to_a_column_wise_head(pool: WorkerPool) -> None:
    pool.run(is_tied_to_a_head, 2)


# -- refusals ----------------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * math.sqrt(self.embedding_dim)


def changed(change: Callable[[nn.Embedding], object]) -> nn.Module:
    layer = nn.Embedding(4, 2)
    change(layer)
    return layer


def hooked(kind: str) -> nn.Module:
    return changed(lambda layer: getattr(layer, f"register_{kind}")(lambda *args: None))


# Made in the test: layers made here would draw numbers in workers that import this module.
MORE: list[tuple[str, Callable[[], nn.Module]]] = [
    ("max_norm=1.0", lambda: nn.Embedding(4, 2, max_norm=1.0)),
    ("scale_grad_by_freq", lambda: nn.Embedding(4, 2, scale_grad_by_freq=True)),
    ("sparse", lambda: nn.Embedding(4, 2, sparse=True)),
    ("EmbeddingBag .* is not nn.Embedding", lambda: nn.EmbeddingBag(4, 2)),
    ("Scaled .* forward of its own", lambda: Scaled(4, 2)),
    ("forward replaced", lambda: changed(lambda layer: setattr(layer, "forward", torch.relu))),
    ("parametrization", lambda: changed(parametrizations.weight_norm)),
    (r"\(scale\)", lambda: changed(lambda layer: layer.register_buffer("scale", torch.ones(())))),
    ("hooks", partial(hooked, "forward_pre_hook")),
    ("hooks", partial(hooked, "full_backward_hook")),
    ("hooks", partial(hooked, "state_dict_post_hook")),
    ("hooks", partial(hooked, "load_state_dict_pre_hook")),
    ("of 4 can't be divided over 5 tensor ranks", lambda: nn.Embedding(4, 2)),
]


@pytest.mark.parametrize(("problem", "make"), MORE)
def test_what_is_more_than_a_table_that_can_be_divided_is_refused(problem: str, make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=problem):
        VocabParallelEmbedding.from_embedding(make(), group=ranks(5))
