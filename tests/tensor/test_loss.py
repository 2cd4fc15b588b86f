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

from lightning_parallel.ranks.shard import Shard
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.loss import vocab_parallel_cross_entropy
from tests.tensor.helpers import Messages, world
from tools.workers.pool import WorkerPool

# Vocabularies that the ranks divide, and others.
sizes = pytest.mark.parametrize(("world_size", "vocabulary"), [(1, 7), (2, 8), (3, 7)])


def check(whole: Tensor, target: Tensor, tolerance: float = 1e-12, **settings: Any) -> Tensor:
    """Compare the loss of the logits ``whole`` [..., vocabulary], and its gradient for this rank's logits, with those
    of ``F.cross_entropy`` in float32 or float64."""
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
    assert reference.grad is not None and local.grad is not None and local.grad.dtype == whole.dtype
    assert_close(loss, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    rounding = 2**-7 if whole.dtype == torch.bfloat16 else tolerance  # of the last bit
    assert_close(local.grad, reference.grad[..., start:stop], rtol=rounding, atol=tolerance, equal_nan=True)
    return loss.detach()


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
            check(whole, target.clone(), **settings)
            target.clamp_(0)
    for smoothing in (0.0, 0.1):  # targets that are all ignored
        losses = [
            check(torch.randn(4, 7), torch.full((4,), -100), reduction=reduction, label_smoothing=smoothing)
            for reduction in ("mean", "sum")
        ]
        assert [str(loss.item()) for loss in losses] == ["nan", "0.0"]
    for settings in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):  # computed in float32
        loss = check(torch.randn(5, 7).bfloat16(), torch.randint(7, (5,)), 1e-6, **settings)
        assert loss.dtype == torch.float32


@sizes
def test_loss_and_gradient_equal_those_of_the_whole_logits(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(equals_the_loss_of_the_whole, world_size, vocabulary)


def equals_for_extreme_logits() -> None:
    target = torch.tensor([0, 6, 3])
    for scale, offset in ((1e4, 0.0), (1e4, 1e5), (1.0, -1e5), (50.0, 800.0)):
        whole = torch.randn(3, 7, dtype=torch.float64) * scale + offset
        assert check(whole, target).isfinite()
        check(whole.float(), target, 1e-6)
    whole = torch.randn(3, 7, dtype=torch.float64)
    whole[:, 4:] = -math.inf  # ids that are masked out: all those of the last rank
    check(whole, torch.tensor([0, 1, 3]))


def test_extreme_logits_neither_overflow_nor_lose_digits(pool: WorkerPool) -> None:
    pool.run(equals_for_extreme_logits, 2)


def on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    whole, target = torch.randn(5, 7, device=device), torch.tensor([0, 6, 3, -100, 2], device=device)
    check(whole.double(), target, label_smoothing=0.1)


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_loss_of_the_whole_logits(pool: WorkerPool) -> None:
    pool.run(on_a_gpu, 3)


def messages_of_a_step(smoothing: float) -> list[list[tuple[str, int]]]:
    logits = torch.randn(5, 8, 50, requires_grad=True)
    size = 50 * dist.get_world_size()
    target = torch.randint(size, (5, 8))
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


def refuses_what_does_not_fit(vocabulary: int) -> None:
    shard = Shard.of((vocabulary,), 0, world())
    logits, target = torch.randn(3, shard.size), torch.tensor([0, vocabulary - 1, 1])

    def loss(logits: Tensor, target: Tensor, vocab_size: int = vocabulary, **settings: Any) -> Tensor:
        return vocab_parallel_cross_entropy(logits, target, group=world(), vocab_size=vocab_size, **settings)

    for wrong in (-1, vocabulary, 10 * vocabulary):
        with pytest.raises(IndexError):
            loss(logits, torch.tensor([0, wrong, 1]))
        loss(logits, torch.tensor([0, wrong, 1]), ignore_index=wrong)
    refused: list[tuple[str, tuple[Tensor, Tensor], dict[str, Any]]] = [
        ("probabilities", (logits, torch.softmax(logits, -1)), {}),
        (r"\(3,\), not \(2,\)", (logits, target[:2]), {}),
        (r"\(3,\), not \(3, 1\)", (logits, target.unsqueeze(-1)), {}),
        (f"vocab_size={2 * vocabulary}", (logits, target), {"vocab_size": 2 * vocabulary}),
        ("reduction='average'", (logits, target), {"reduction": "average"}),
        ("label_smoothing=-0.1", (logits, target), {"label_smoothing": -0.1}),
    ]
    if shard.count > 1:
        # Gathered logits would be summed on every rank: the loss would be larger by log(ranks), and train just as well.
        gathered = functions.gather(logits, 1, world(), vocabulary)
        refused.append(("gather_output", (gathered, target), {}))
    for message, given, options in refused:
        with pytest.raises(ValueError, match=message):
            loss(*given, **options)
    loss(logits, target.int())


@sizes
def test_what_does_not_fit_is_refused_on_every_rank(pool: WorkerPool, world_size: int, vocabulary: int) -> None:
    pool.run(refuses_what_does_not_fit, world_size, vocabulary)


def keeps_its_inputs() -> None:
    logits, target = torch.randn(3, 4, requires_grad=True), torch.tensor([0, -100, 7])
    before = logits.detach().clone(), target.clone()
    for reduction in ("none", "mean", "sum"):
        loss = vocab_parallel_cross_entropy(logits, target, group=world(), vocab_size=8, reduction=reduction)
        loss.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss.sum(), logits, create_graph=True)
    assert torch.equal(logits, before[0]) and torch.equal(target, before[1])


def test_inputs_stay_as_they_are(pool: WorkerPool) -> None:
    pool.run(keeps_its_inputs, 2)
