"""The loss of divided logits equals that of the whole, and so do its gradients; the logits are never put together."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from lightning_parallel.absent.tensor import AbsentTensor, absent_like
from lightning_parallel.ranks.shard import Shard
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.loss import vocab_parallel_cross_entropy
from tests.pool import WorkerPool
from tests.tensor.messages import Messages

# Vocabularies that the ranks divide, and others.
SIZES = [(1, 7), (2, 8), (2, 7), (3, 9), (3, 7), (4, 12), (4, 11)]
sizes = pytest.mark.parametrize(("world_size", "vocabulary"), SIZES)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def by_both(whole: Tensor, target: Tensor, **settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of the logits ``whole`` [..., vocabulary] and its gradient for this rank's logits: as it should be, by
    ``F.cross_entropy`` in float32 or float64, and as it is."""
    shard = Shard.of(whole.shape[-1:], 0, world())
    [(start, stop)] = shard.ranges()
    upstream: Any = 3.0
    if settings.get("reduction") == "none":
        upstream = torch.linspace(1, 2, target.numel(), dtype=torch.float64).view(target.shape)

    reference = whole.clone().requires_grad_()
    exact = reference.to(torch.promote_types(whole.dtype, torch.float32)).movedim(-1, 1 if whole.dim() > 1 else 0)
    expected = F.cross_entropy(exact, target, **settings)
    (expected * upstream).sum().backward()

    local = whole[..., start:stop].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, group=world(), vocab_size=whole.shape[-1], **settings)
    (loss * upstream).sum().backward()
    assert reference.grad is not None
    assert local.grad is not None
    return expected, loss, reference.grad[..., start:stop], local.grad


def equals_the_loss_of_the_whole(vocabulary: int) -> None:
    for shape, reduction, smoothing in itertools.product(
        [(6,), (2, 5), (2, 2, 2), (1,), ()], ["mean", "sum", "none"], [0.0, 0.1, 1.0]
    ):
        whole = torch.randn(*shape, vocabulary, dtype=torch.float64) * 3
        target = torch.randint(vocabulary, shape)
        for ignored in (-100, 0, vocabulary - 1, -1):
            if ignored < 0 and target.numel() > 1:
                target.view(-1)[1] = ignored
            settings = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
            expected, loss, gradient, ours = by_both(whole, target.clone(), **settings)
            assert_close(loss, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
            assert_close(ours, gradient, rtol=1e-12, atol=1e-12, equal_nan=True)
            target.clamp_(0)


@sizes
def test_loss_and_gradient_equal_those_of_the_whole_logits(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(equals_the_loss_of_the_whole, world_size, vocabulary)


def equals_where_nothing_counts() -> list[float]:
    whole = torch.randn(4, 7, dtype=torch.float64)
    losses = []
    for reduction, smoothing in itertools.product(["mean", "sum"], [0.0, 0.1]):
        settings = {"reduction": reduction, "label_smoothing": smoothing}
        expected, loss, gradient, ours = by_both(whole, torch.full((4,), -100), **settings)
        assert_close(loss, expected, rtol=0, atol=0, equal_nan=True)
        assert_close(ours, gradient, rtol=0, atol=0)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_targets_that_are_all_ignored_give_what_torch_gives(pool: WorkerPool, world_size: int) -> None:
    for losses in pool.run(equals_where_nothing_counts, world_size):
        assert [str(x) for x in losses] == ["nan", "nan", "0.0", "0.0"]


def equals_for_extreme_logits() -> None:
    target = torch.tensor([0, 6, 3])
    for scale, offset in ((1e4, 0.0), (1e4, 1e5), (1.0, -1e5), (50.0, 800.0)):
        whole = torch.randn(3, 7, dtype=torch.float64) * scale + offset
        expected, loss, gradient, ours = by_both(whole, target)
        assert loss.isfinite()
        assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert_close(ours, gradient, rtol=1e-12, atol=1e-12)
        _, loss, _, ours = by_both(whole.float(), target)
        assert_close(loss, F.cross_entropy(whole.float().double(), target).float(), rtol=1e-6, atol=1e-6)
        assert ours.isfinite().all()

    whole = torch.randn(3, 7, dtype=torch.float64)
    whole[:, 4:] = -math.inf  # ids that are masked out: all those of the last rank
    target = torch.tensor([0, 1, 3])
    expected, loss, gradient, ours = by_both(whole, target)
    assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_close(ours, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_extreme_logits_neither_overflow_nor_lose_digits(pool: WorkerPool, world_size: int) -> None:
    pool.run(equals_for_extreme_logits, world_size)


def computes_in_float32() -> None:
    whole = torch.randn(5, 7).to(torch.bfloat16)
    target = torch.randint(7, (5,))
    for settings in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        expected, loss, gradient, ours = by_both(whole, target, **settings)
        assert loss.dtype == torch.float32
        assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        assert ours.dtype == torch.bfloat16
        assert_close(ours, gradient, rtol=2**-7, atol=1e-6)  # a rounding of the last bit


@pytest.mark.parametrize("world_size", [1, 2])
def test_bf16_logits_are_computed_in_float32(pool: WorkerPool, world_size: int) -> None:
    pool.run(computes_in_float32, world_size)


def messages_of_a_step(smoothing: float) -> list[list[tuple[str, int]]]:
    logits = torch.randn(5, 8, 50, requires_grad=True)
    target = torch.randint(50 * dist.get_world_size(), (5, 8))
    size = 50 * dist.get_world_size()
    with Messages() as forward:
        loss = vocab_parallel_cross_entropy(logits, target, group=world(), vocab_size=size, label_smoothing=smoothing)
    with Messages() as backward:
        loss.backward()
    return [forward.sent, backward.sent]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_three_numbers_a_row_are_sent_and_the_logits_never(pool: WorkerPool, smoothing: float) -> None:
    rows = 5 * 8
    assert pool.run(messages_of_a_step, 2, smoothing) == [[[("allreduce_", rows), ("allreduce_", 2 * rows)], []]] * 2
    assert pool.run(messages_of_a_step, 1, smoothing) == [[[], []]]


def takes_gathered_logits() -> None:
    """Where every rank passes all logits, each is summed on every rank: the loss is larger by log(ranks), and trains
    just as well (Megatron-LM, issue 7452)."""
    size, ranks = 6, dist.get_world_size()
    whole = torch.randn(4, size, dtype=torch.float64)
    target = torch.randint(size, (4,))
    local = functions.own_piece(whole, 1, world())
    expected = F.cross_entropy(whole, target)
    loss = vocab_parallel_cross_entropy(local, target, group=world(), vocab_size=size)
    assert_close(loss, expected, rtol=1e-12, atol=1e-12)

    gathered = functions.gather(local, 1, world(), size)
    with pytest.raises(ValueError, match="leave out gather_output"):
        vocab_parallel_cross_entropy(gathered, target, group=world(), vocab_size=size)
    # The fault itself: nothing but the size that must be given can tell.
    faulty = vocab_parallel_cross_entropy(gathered, target, group=world(), vocab_size=size * ranks)
    assert_close(faulty, expected + math.log(ranks), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathered_logits_are_refused(pool: WorkerPool, world_size: int) -> None:
    pool.run(takes_gathered_logits, world_size)


def refuses_what_does_not_fit(vocabulary: int) -> None:
    shard = Shard.of((vocabulary,), 0, world())
    logits, target = torch.randn(3, shard.size), torch.tensor([0, vocabulary - 1, 1])

    def loss(logits: Tensor, target: Tensor, vocab_size: int = vocabulary, **settings: Any) -> Tensor:
        return vocab_parallel_cross_entropy(logits, target, group=world(), vocab_size=vocab_size, **settings)

    for wrong in (-1, vocabulary, 10 * vocabulary):
        with pytest.raises(IndexError):
            loss(logits, torch.tensor([0, wrong, 1]))
        loss(logits, torch.tensor([0, wrong, 1]), ignore_index=wrong)
    with pytest.raises(ValueError, match="probabilities"):
        loss(logits, torch.softmax(logits, -1))
    with pytest.raises(ValueError, match=r"targets of shape \(3,\), not \(2,\)"):
        loss(logits, target[:2])
    with pytest.raises(ValueError, match=r"targets of shape \(3,\), not \(3, 1\)"):
        loss(logits, target.unsqueeze(-1))
    with pytest.raises(ValueError, match=f"of vocab_size={2 * vocabulary}"):
        loss(logits, target, vocab_size=2 * vocabulary)
    with pytest.raises(ValueError, match="reduction='average'"):
        loss(logits, target, reduction="average")
    with pytest.raises(ValueError, match="label_smoothing=-0.1"):
        loss(logits, target, label_smoothing=-0.1)
    loss(logits, target.int())


@sizes
def test_what_does_not_fit_is_refused_on_every_rank(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(refuses_what_does_not_fit, world_size, vocabulary)


def passes_tensors_without_memory() -> None:
    logits, target = torch.randn(2, 3, 4, requires_grad=True), torch.randint(8, (2, 3))
    absent = absent_like(logits, "the head")
    with Messages() as messages:
        for given, aim in ((absent, target), (absent, absent_like(target, "the batch"))):
            for reduction, shape in (("mean", ()), ("sum", ()), ("none", (2, 3))):
                for smoothing in (0.0, 0.1):
                    loss = vocab_parallel_cross_entropy(
                        given, aim, group=world(), vocab_size=8, reduction=reduction, label_smoothing=smoothing
                    )
                    assert isinstance(loss, AbsentTensor)
                    assert (loss.shape, loss.dtype) == (shape, torch.float32)
        meta = vocab_parallel_cross_entropy(logits.to("meta"), target.to("meta"), group=world(), vocab_size=8)
        assert meta.shape == ()
    assert messages.sent == []


def test_tensors_without_memory_pass_and_nothing_is_sent(pool: WorkerPool) -> None:
    pool.run(passes_tensors_without_memory, 2)


def keeps_its_inputs() -> None:
    logits, target = torch.randn(3, 4, requires_grad=True), torch.tensor([0, -100, 7])
    before = logits.detach().clone(), target.clone()
    upstream = torch.ones(3)
    loss = vocab_parallel_cross_entropy(
        logits, target, group=world(), vocab_size=8, reduction="none", label_smoothing=0.1
    )
    loss.backward(upstream)
    assert torch.equal(logits, before[0])
    assert torch.equal(target, before[1])
    assert torch.equal(upstream, torch.ones(3))

    for reduction in ("mean", "sum"):
        first = vocab_parallel_cross_entropy(logits, target, group=world(), vocab_size=8, reduction=reduction)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(first, logits, create_graph=True)


def test_inputs_stay_as_they_are_and_double_backward_is_refused(pool: WorkerPool) -> None:
    pool.run(keeps_its_inputs, 2)


def divides_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    whole = torch.randn(5, 7, device=device, dtype=torch.float64)
    target = torch.tensor([0, 6, 3, -100, 2], device=device)
    expected, loss, gradient, ours = by_both(whole, target, label_smoothing=0.1)
    assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert_close(ours, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_loss_of_the_whole_logits(pool: WorkerPool) -> None:
    pool.run(divides_on_a_gpu, 3)
