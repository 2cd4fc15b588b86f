"""The divided table equals the whole one: what it returns, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from tests.tensor.helpers import close, world
from tools.workers.pool import WorkerPool

# Vocabularies that the ranks divide, and others.
sizes = pytest.mark.parametrize(("world_size", "vocabulary"), [(1, 7), (2, 8), (3, 7)])


def equals_the_whole_table(vocabulary: int, device: str = "cpu") -> None:
    ids = torch.randint(vocabulary, (3, 5), device=device)
    ids[0] = torch.tensor([0, vocabulary - 1, vocabulary - 1, 0, 2])  # the same row several times, and both ends
    upstream = torch.randn(3, 5, 4, dtype=torch.float64, device=device)
    for padding in (None, 0, 2, vocabulary - 1, -2):
        torch.manual_seed(3)
        whole = nn.Embedding(vocabulary, 4, padding, dtype=torch.float64, device=device)
        nn.init.normal_(whole.weight)  # the padding row, too: it is looked up as any other
        layer = VocabParallelEmbedding.from_embedding(whole, group=world())
        assert torch.equal(layer.weight, layer.shards["weight"].take(whole.weight))
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
def test_it_equals_the_whole_table(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(equals_the_whole_table, world_size, vocabulary)


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_whole_table(pool: WorkerPool) -> None:
    pool.run(equals_the_whole_table, 3, 7, "cuda")
