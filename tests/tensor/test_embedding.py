"""The divided table equals the whole one: what it returns, its gradients, and how it starts."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from lightning_parallel.absent.tensor import AbsentTensor, absent_like
from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from tests.pool import WorkerPool
from tests.tensor.messages import Messages

# Vocabularies that the ranks divide, and others.
SIZES = [(1, 7), (2, 8), (2, 7), (3, 7), (3, 9), (4, 7), (4, 11)]
sizes = pytest.mark.parametrize(("world_size", "vocabulary"), SIZES)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def equals_the_whole_table(vocabulary: int) -> None:
    ids = torch.randint(vocabulary, (3, 5))
    ids[0] = torch.tensor([0, vocabulary - 1, vocabulary - 1, 0, 2])  # the same row several times, and both ends
    upstream = torch.randn(3, 5, 4, dtype=torch.float64)
    for padding in (None, 0, 2, vocabulary - 1, -2):
        whole = nn.Embedding(vocabulary, 4, padding, dtype=torch.float64)
        nn.init.normal_(whole.weight)  # the padding row, too: it is looked up as any other
        layer = VocabParallelEmbedding.from_embedding(whole, group=world())
        for shape in (ids, ids[0], ids[0, 0], ids[:0], ids.t(), ids.int()):
            assert_close(layer(shape), whole(shape), rtol=0, atol=0)
        whole(ids).backward(upstream)
        layer(ids).backward(upstream)
        expected = layer.shards["weight"].take(gradient(whole.weight))
        assert_close(gradient(layer.weight), expected, rtol=1e-12, atol=1e-12)


@sizes
def test_output_and_gradient_equal_the_whole_table(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(equals_the_whole_table, world_size, vocabulary)


def starts_as_the_slices_of_the_whole_table(vocabulary: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(3)
        whole = nn.Embedding(vocabulary, 4, 1, dtype=dtype)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        layer = VocabParallelEmbedding(vocabulary, 4, 1, group=world(), dtype=dtype)
        assert torch.equal(torch.get_rng_state(), after)
        expected = layer.shards["weight"].take(whole.weight)
        assert torch.equal(layer.weight, expected)
        with torch.no_grad():
            layer.weight.zero_()
        torch.manual_seed(3)
        layer.reset_parameters()
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(layer.weight, expected)


@sizes
def test_it_starts_as_the_slices_of_the_whole_table(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(starts_as_the_slices_of_the_whole_table, world_size, vocabulary)


def looks_up_what_is_not_there(vocabulary: int) -> None:
    layer = VocabParallelEmbedding(vocabulary, 4, group=world())
    for wrong in (-1, -vocabulary, -100, vocabulary, vocabulary + 1, 10 * vocabulary):
        with pytest.raises(IndexError):
            layer(torch.tensor([[0, wrong]]))
    layer(torch.tensor([[0, vocabulary - 1]]))


@sizes
def test_ids_out_of_the_vocabulary_are_errors_on_every_rank(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(looks_up_what_is_not_there, world_size, vocabulary)


def messages_of_a_step() -> tuple[list[tuple[str, int]], list[tuple[str, int]], str]:
    layer = VocabParallelEmbedding(8, 4, group=world())
    with Messages() as forward:
        rows = layer(torch.tensor([[0, 7, 7]]))
    with Messages() as backward:
        rows.sum().backward()
    assert rows.grad_fn is not None
    return forward.sent, backward.sent, rows.grad_fn.name()


def test_a_step_sends_the_rows_once(pool: WorkerPool) -> None:
    for forward, backward, _ in pool.run(messages_of_a_step, 2):
        assert (forward, backward) == ([("allreduce_", 12)], [])


def test_one_rank_does_what_the_whole_table_does(pool: WorkerPool) -> None:
    assert pool.run(messages_of_a_step, 1) == [([], [], "EmbeddingBackward0")]


def is_tied_to_a_head() -> None:
    torch.manual_seed(1)
    table, head = nn.Embedding(7, 6, dtype=torch.float64), nn.Linear(6, 7, bias=False, dtype=torch.float64)
    head.weight = table.weight
    ids = torch.tensor([[0, 6, 3]])
    F.cross_entropy(head(table(ids))[0], ids[0]).backward()

    shared: dict[int, nn.Parameter] = {}
    parallel_table = VocabParallelEmbedding.from_embedding(table, group=world(), shared=shared)
    parallel_head = ColumnParallelLinear.from_linear(head, group=world(), gather_output=True, shared=shared)
    assert parallel_head.weight is parallel_table.weight
    F.cross_entropy(parallel_head(parallel_table(ids))[0], ids[0]).backward()
    expected = parallel_table.shards["weight"].take(gradient(table.weight))
    assert_close(gradient(parallel_table.weight), expected, rtol=1e-12, atol=1e-12)

    again = VocabParallelEmbedding.from_embedding(table, group=world(), shared=shared)
    assert again.weight is parallel_table.weight
    shared = {}
    RowParallelLinear.from_linear(head, group=world(), shared=shared)
    with pytest.raises(ValueError, match="in two ways"):
        VocabParallelEmbedding.from_embedding(table, group=world(), shared=shared)


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_stays_tied_to_a_column_wise_head(pool: WorkerPool, world_size: int) -> None:
    pool.run(is_tied_to_a_head, world_size)


def passes_tensors_without_memory() -> None:
    whole = VocabParallelEmbedding(7, 4, group=world())
    absent = copy.deepcopy(whole)
    absent.weight = absent_like(absent.weight, "the table")  # type: ignore[assignment]
    ids = torch.tensor([[0, 6, 3]])
    with Messages() as messages:
        for layer, given in ((whole, absent_like(ids, "ids")), (absent, ids)):
            rows = layer(given)
            assert isinstance(rows, AbsentTensor)
            assert (rows.shape, rows.dtype) == ((1, 3, 4), torch.float32)
        meta = VocabParallelEmbedding(7, 4, group=world(), device="meta")
        assert meta(ids.to("meta")).shape == (1, 3, 4)
    assert messages.sent == []


def test_tensors_without_memory_pass_and_nothing_is_sent(pool: WorkerPool) -> None:
    pool.run(passes_tensors_without_memory, 2)


def stays_as_the_layer_was() -> list[str]:
    whole = nn.Embedding(7, 4, 2, dtype=torch.bfloat16).eval()
    whole.weight.requires_grad_(False)
    before = whole.weight.clone()
    layer = VocabParallelEmbedding.from_embedding(whole, group=world())
    assert (layer.weight.dtype, layer.weight.requires_grad, layer.training) == (torch.bfloat16, False, False)
    assert torch.equal(whole.weight, before)
    assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes  # no view that keeps the whole
    ids = torch.arange(7)
    assert torch.equal(layer(ids), whole(ids))  # one rank's row plus zeros: nothing is rounded

    duplicate = copy.deepcopy(layer)
    assert duplicate.group is layer.group
    assert duplicate.weight is not layer.weight
    assert torch.equal(duplicate(ids), whole(ids))
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(layer)
    return [repr(layer), repr(VocabParallelEmbedding(6, 4, group=world()))]


def test_a_table_keeps_its_settings(pool: WorkerPool) -> None:
    reprs = pool.run(stays_as_the_layer_was, 2)
    assert reprs[0] == [
        "VocabParallelEmbedding(7 (4 here), 4, padding_idx=2)",
        "VocabParallelEmbedding(6 (3 here), 4)",
    ]
    assert reprs[1][0] == "VocabParallelEmbedding(7 (3 here), 4, padding_idx=2)"


def uses_the_weight_of_the_moment() -> None:
    """An asynchronous pipeline swaps the parameter for a leaf of its own."""
    layer = VocabParallelEmbedding(4, 2, group=world())
    leaf = torch.ones_like(layer.weight).requires_grad_()
    layer._parameters["weight"] = leaf  # type: ignore[assignment]
    rows = layer(torch.arange(4))
    assert torch.equal(rows, torch.ones(4, 2))
    rows.sum().backward()
    assert torch.equal(gradient(leaf), torch.ones_like(leaf))


def test_it_uses_the_weight_of_the_moment(pool: WorkerPool) -> None:
    pool.run(uses_the_weight_of_the_moment, 2)


def has_too_few_rows() -> None:
    with pytest.raises(ValueError, match="of 5 can't be divided over 4 tensor ranks"):
        VocabParallelEmbedding(5, 4, group=world())


def test_a_vocabulary_that_leaves_a_rank_without_rows_is_refused(pool: WorkerPool) -> None:
    pool.run(has_too_few_rows, 4)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * math.sqrt(self.embedding_dim)


def changed(change: Callable[[nn.Embedding], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.Embedding(4, 2)
        change(layer)
        return layer

    return make


def ignore(*args: object) -> None:
    return None


# Made in the test: layers made here would draw numbers in workers that import this module.
MORE = {
    "max_norm=1.0": lambda: nn.Embedding(4, 2, max_norm=1.0),
    "scale_grad_by_freq": lambda: nn.Embedding(4, 2, scale_grad_by_freq=True),
    "sparse": lambda: nn.Embedding(4, 2, sparse=True),
    "EmbeddingBag .* is not nn.Embedding": lambda: nn.EmbeddingBag(4, 2),
    "Scaled .* forward of its own": lambda: Scaled(4, 2),
    "forward replaced": changed(lambda layer: setattr(layer, "forward", ignore)),
    "parametrization": changed(parametrizations.weight_norm),
    r"\(scale\), which would be lost": changed(lambda layer: layer.register_buffer("scale", torch.ones(()))),
}
HOOKS: list[Callable[[nn.Embedding], object]] = [
    lambda layer: layer.register_forward_pre_hook(ignore),
    lambda layer: layer.register_full_backward_hook(ignore),
    lambda layer: layer.register_full_backward_pre_hook(ignore),
    lambda layer: layer.register_state_dict_post_hook(ignore),
    lambda layer: layer.register_state_dict_pre_hook(ignore),
    lambda layer: layer.register_load_state_dict_pre_hook(ignore),
    lambda layer: layer.register_load_state_dict_post_hook(ignore),
]


def test_hooks_on_the_output_go_on(pool: WorkerPool) -> None:
    """transformers' gradient checkpointing asks for gradients of an embedding's output by such a hook."""
    pool.run(hooks_go_on, 2)


def hooks_go_on() -> None:
    table = nn.Embedding(6, 2)
    ids = torch.tensor([0, 5, 3])
    handle = table.register_forward_hook(lambda layer, args, output: 2 * output)
    expected = table(ids)
    layer = VocabParallelEmbedding.from_embedding(table, group=world())
    assert torch.equal(layer(ids), expected)
    handle.remove()
    assert torch.equal(layer(ids), expected / 2)


@pytest.mark.parametrize(("problem", "make"), [*MORE.items(), *(("has hooks", changed(hook)) for hook in HOOKS)])
def test_what_is_more_than_a_table_is_refused(problem: str, make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=problem):
        VocabParallelEmbedding.from_embedding(make(), group=None)  # type: ignore[arg-type]  # asked for later


def divides_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(3)
    whole = nn.Embedding(7, 4, 1, device=device)
    torch.manual_seed(3)
    layer = VocabParallelEmbedding(7, 4, 1, group=world(), device=device)
    assert torch.equal(layer.weight, layer.shards["weight"].take(whole.weight))
    torch.manual_seed(3)
    layer.reset_parameters()
    assert torch.equal(layer.weight, layer.shards["weight"].take(whole.weight))
    ids = torch.tensor([[0, 6, 3, 6]], device=device)
    whole(ids).sum().backward()
    layer(ids).sum().backward()
    assert torch.equal(layer(ids), whole(ids))
    assert torch.equal(gradient(layer.weight), layer.shards["weight"].take(gradient(whole.weight)))


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_whole_table(pool: WorkerPool) -> None:
    pool.run(divides_on_a_gpu, 3)
