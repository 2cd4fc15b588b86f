"""The terms of a loss, in microbatches, make the loss of the batch; or a warning says that they don't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.batch import batch_size, sizes, split
from lightning_parallel.parts.loss_means import LossMeans
from lightning_parallel.pipeline import loss_terms, recording
from lightning_parallel.pipeline.averaging import average
from lightning_parallel.pipeline.loss_terms import LossTerms
from lightning_parallel.pipeline.recording import Recording

CLASSES = 7
SAMPLES, LENGTH = 10, 6
Batch = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, 5)
        self.wide, self.narrow = nn.Linear(5, CLASSES), nn.Linear(5, 2)

    def logits(self, batch: Batch) -> Tensor:  # [samples, length, classes]
        return self.wide(self.embed(batch["ids"]))


def a_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator)
    ignored = torch.rand(SAMPLES, LENGTH, generator=generator) < torch.linspace(0, 0.9, SAMPLES)[:, None]
    ignored[6:8] = True  # a microbatch without labels
    return {
        "ids": ids,
        "labels": ids.masked_fill(ignored, -100),
        "kind": torch.randint(0, 2, (SAMPLES,), generator=generator),
        "x": torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64),
        "lengths": torch.randint(1, LENGTH, (SAMPLES,), generator=generator),
    }


def in_microbatches(
    step: Callable[[Net, Batch], Tensor], count: int = 4, checks: bool = True
) -> tuple[float, Net, LossTerms, list[str]]:
    """The loss, the gradients on a model, the terms, and the warnings of a batch in microbatches."""
    net, batch, warned = Net().double(), a_batch(), []
    parts, counts = split(batch, count), sizes(SAMPLES, count)
    means = LossMeans(net, [net.embed, net.wide, net.narrow], None, is_last_stage=True, device=torch.device("cpu"))
    terms = LossTerms(batch, parts, counts, warn=lambda key, words: warned.append(words), checks=checks)
    total = 0.0
    with means.around_batch():
        for k, part in enumerate(parts):
            with means.watched(terms, k) as mode:
                loss = step(net, part)
                if isinstance(mode, Recording):
                    mode.check_loss(loss)
            (loss * counts[k] / SAMPLES).backward()
            total += loss.item() * counts[k] / SAMPLES
    return total, net, terms, warned


def whole(step: Callable[[Net, Batch], Tensor]) -> tuple[float, Net]:
    net = Net().double()
    loss = step(net, a_batch())
    loss.backward()
    return loss.item(), net


def assert_equal(step: Callable[[Net, Batch], Tensor], checks: bool = True) -> LossTerms:
    total, net, terms, warned = in_microbatches(step, checks=checks)
    expected, reference = whole(step)
    assert total == pytest.approx(expected, rel=0, abs=1e-12)
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12, msg=name)
    assert warned == []
    return terms


# -- what is a mean over something else than samples -------------------------------------------------------------------


def transformers_causal(net: Net, batch: Batch) -> Tensor:
    labels = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(net.logits(batch).view(-1, CLASSES), labels.view(-1))


def sizes_of_the_logits(net: Net, batch: Batch) -> Tensor:
    logits = net.logits(batch)
    size, length, classes = logits.shape
    return F.cross_entropy(logits.view(size * length, classes), batch["labels"].view(size * length))


def sizes_of_the_batch(net: Net, batch: Batch) -> Tensor:
    size, _ = batch["ids"].shape
    labels = torch.cat([torch.full((size, 2), -100), batch["labels"][:, 2:]], 1)
    return F.cross_entropy(net.logits(batch).transpose(1, 2), labels)


def weights_of_classes(net: Net, batch: Batch) -> Tensor:
    weight = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    return F.cross_entropy(net.logits(batch).transpose(1, 2), batch["labels"], weight=weight, label_smoothing=0.1)


def negative_log_likelihood(net: Net, batch: Batch) -> Tensor:
    return F.nll_loss(net.logits(batch).log_softmax(-1).transpose(1, 2), batch["labels"])


def two_terms(net: Net, batch: Batch) -> Tensor:
    hidden = net.embed(batch["ids"])
    masked = F.cross_entropy(net.wide(hidden).flatten(0, 1), batch["labels"].flatten())
    return masked + 0.5 * F.cross_entropy(net.narrow(hidden[:, 0]), batch["kind"])


def changed_in_place(net: Net, batch: Batch) -> Tensor:
    labels = batch["ids"].clone()
    labels[labels == 3] = -100
    flat = labels.view(-1)
    flat[flat == 2] = -100
    return F.cross_entropy(net.logits(batch).flatten(0, 1), labels.flatten())


def divided_by_a_mask(net: Net, batch: Batch) -> Tensor:
    length = batch["ids"].size(1)
    mask = (torch.arange(length)[None] < batch["lengths"][:, None]).double()
    losses = F.cross_entropy(net.logits(batch).flatten(0, 1), batch["ids"].flatten(), reduction="none")
    return (losses.view(mask.shape) * mask).sum() / mask.sum().clamp(min=1)


def divided_by_a_number(net: Net, batch: Batch) -> Tensor:
    counts = batch["labels"] != -100
    losses = F.cross_entropy(net.logits(batch).transpose(1, 2), batch["ids"], reduction="none")
    return (losses * counts).sum() / max(counts.sum().item(), 1)


def mean_over_a_mean(net: Net, batch: Batch) -> Tensor:
    mask = (batch["lengths"] > 2).double()
    return (net.narrow(batch["x"]).pow(2).mean(1) * mask).mean() / mask.mean()


def picked_labels(net: Net, batch: Batch) -> Tensor:
    counts = batch["labels"] != -100
    return F.cross_entropy(net.logits(batch)[counts], batch["labels"][counts])


def picked_losses(net: Net, batch: Batch) -> Tensor:
    losses = F.cross_entropy(net.logits(batch).transpose(1, 2), batch["ids"], reduction="none")
    return losses[batch["ids"] > 2].mean()


def picked_samples(net: Net, batch: Batch) -> Tensor:
    long = batch["lengths"] > 2
    return F.mse_loss(net.narrow(batch["x"])[long], batch["x"][:, :2][long])


COUNTED = [
    transformers_causal, sizes_of_the_logits, sizes_of_the_batch, weights_of_classes, negative_log_likelihood,
    two_terms, changed_in_place, divided_by_a_mask, divided_by_a_number, mean_over_a_mean, picked_labels,
    picked_losses, picked_samples,
]  # fmt: skip


@pytest.mark.parametrize("step", COUNTED)
def test_a_term_is_divided_by_the_batch_s_number(step: Callable[[Net, Batch], Tensor]) -> None:
    assert assert_equal(step).need_watching


def labels_of_all(net: Net, batch: Batch) -> Tensor:
    return F.cross_entropy(net.logits(batch).transpose(1, 2), batch["ids"])


def sum_over_samples(net: Net, batch: Batch) -> Tensor:
    return F.cross_entropy(net.logits(batch)[:, 0], batch["ids"][:, 0], reduction="sum") / len(batch["ids"])


def penalty(net: Net, batch: Batch) -> Tensor:
    penalties = sum(parameter.pow(2).sum() for parameter in net.parameters())
    return F.mse_loss(net.wide(batch["x"]), torch.zeros(len(batch["x"]), CLASSES)) + 0.1 * penalties


def means_of_classes(net: Net, batch: Batch) -> Tensor:
    return (net.wide(batch["x"]).mean(0) * torch.arange(CLASSES)).sum()


@pytest.mark.parametrize("step", [labels_of_all, sum_over_samples, penalty, means_of_classes])
def test_means_over_samples_are_left_as_they_are(step: Callable[[Net, Batch], Tensor]) -> None:
    assert not assert_equal(step).need_watching


def test_a_microbatch_without_labels_adds_nothing() -> None:
    def step(net: Net, batch: Batch) -> Tensor:
        return F.cross_entropy(net.logits(batch).transpose(1, 2), batch["labels"])

    terms = assert_equal(step)
    (term,) = terms.terms
    assert term is not None and term.divisors is not None and 0.0 in term.divisors


READ_BY_THE_USER = (divided_by_a_number,)  # who asks for the value, once a microbatch


@pytest.mark.parametrize("step", [step for step in COUNTED if step not in READ_BY_THE_USER])
def test_where_nothing_is_checked_no_divisor_is_read(
    step: Callable[[Net, Batch], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, after the first batch."""

    def numbers(values: Any) -> Any:
        raise AssertionError("the host waits")

    monkeypatch.setattr(loss_terms, "numbers", numbers)
    monkeypatch.setattr(recording, "numbers", numbers)
    assert assert_equal(step, checks=False).need_watching


def test_a_divisor_that_is_not_read_leaves_the_loss_its_dtype() -> None:
    losses: list[Tensor] = []

    def step(net: Net, batch: Batch) -> Tensor:
        logits = net.logits(batch).float().transpose(1, 2)
        losses.append(F.cross_entropy(logits, batch["labels"]))
        counts = batch["labels"] != -100
        losses.append((F.cross_entropy(logits, batch["ids"], reduction="none") * counts).sum() / counts.sum())
        return losses[-2] + losses[-1]

    in_microbatches(step, checks=False)
    assert len(losses) == 8 and {loss.dtype for loss in losses} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checks", [True, False])
def test_under_autocast_the_loss_is_exact_as_in_one_process(checks: bool, dtype: torch.dtype) -> None:
    losses: list[Tensor] = []

    def step(net: Net, batch: Batch) -> Tensor:
        logits = net.logits(batch).to(dtype).transpose(1, 2)
        with torch.autocast("cpu", dtype):
            losses.append(F.cross_entropy(logits, batch["labels"]))
        return losses[-1].double()

    in_microbatches(step, checks=checks)
    assert {loss.dtype for loss in losses} == {torch.float32}


def test_a_divisor_that_16_bits_do_not_hold_is_not_rounded() -> None:
    total = torch.tensor(6e4, dtype=torch.float16)
    for divide in (torch.div, Tensor.__truediv__, Tensor.div_):
        found = average(divide, (total.clone(), torch.tensor(1)), {})
        assert found is not None
        quotient = found.divided(torch.tensor(1e5, dtype=torch.float64))
        assert quotient.dtype == torch.float16 and float(quotient) == pytest.approx(0.6, rel=1e-3)


def test_a_number_of_hits_is_divided_by_what_is_not_a_whole_number() -> None:
    logged: dict[bool, list[float]] = {}

    def step(net: Net, batch: Batch) -> Tensor:
        logits = net.logits(batch)
        counts = batch["labels"] != -100
        hits = ((logits.argmax(-1) == batch["ids"]) & counts).sum() / counts.sum()
        logged.setdefault(checks, []).append(float(hits))
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"])

    for checks in (True, False):
        in_microbatches(step, count=3, checks=checks)
    assert logged[False] == pytest.approx(logged[True], rel=1e-6) and max(logged[True]) > 0


def test_integers_of_a_step_forget_the_batch_when_it_has_ended() -> None:
    seen: list[int] = [0]

    def step(net: Net, batch: Batch) -> Tensor:
        seen.append(seen[-1] + batch["ids"].numel())
        return labels_of_all(net, batch)

    for _ in range(2):
        in_microbatches(step)
    assert seen[-1] == 2 * SAMPLES * LENGTH
    assert type(seen[-1]) is int  # not a chain through all batches


# -- what can't be right -----------------------------------------------------------------------------------------------


def drawn_labels(net: Net, batch: Batch) -> Tensor:
    labels = batch["ids"].masked_fill(torch.rand(batch["ids"].shape) < 0.5, -100)
    return F.cross_entropy(net.logits(batch).transpose(1, 2), labels)


def read_by_python(net: Net, batch: Batch) -> Tensor:
    longest = int(batch["lengths"].max()) - 0
    return F.cross_entropy(net.logits(batch)[:, :longest].transpose(1, 2), batch["ids"][:, :longest])


def labels_of_the_model(net: Net, batch: Batch) -> Tensor:
    logits = net.logits(batch)
    labels = logits.argmax(-1).masked_fill(logits.amax(-1) < 0.9, -100)
    return F.cross_entropy(logits.transpose(1, 2), labels)


def summed(net: Net, batch: Batch) -> Tensor:
    return F.cross_entropy(net.logits(batch).transpose(1, 2), batch["labels"], reduction="sum")


def half_a_sum(net: Net, batch: Batch) -> Tensor:
    return F.mse_loss(net.wide(batch["x"]), batch["x"].repeat(1, 2)[:, :CLASSES]) - 0.5 * torch.sum(
        net.narrow(batch["x"]).pow(2)
    )


def compared(net: Net, batch: Batch) -> Tensor:
    out = net.narrow(batch["x"])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (drawn_labels, "The cross_entropy at test_loss_terms.py:"),
        (read_by_python, "The cross_entropy at test_loss_terms.py:"),
        (labels_of_the_model, "The cross_entropy at test_loss_terms.py:"),
        (summed, "The loss is a sum over the batch."),
        (half_a_sum, "The loss is a sum over the batch."),
        (compared, "compares the samples of a batch with each other"),
    ],
)
def test_what_can_t_be_a_mean_is_said(step: Callable[[Net, Batch], Tensor], words: str) -> None:
    warned = in_microbatches(step)[-1]
    assert warned and all(words in each and "microbatches=1" in each for each in warned)


def test_a_step_that_changes_from_microbatch_to_microbatch_is_refused() -> None:
    calls = []

    def step(net: Net, batch: Batch) -> Tensor:
        calls.append(batch_size(batch))
        labels = batch["labels"] if len(calls) == 1 else batch["labels"].masked_fill(batch["ids"] == 1, -100)
        return F.cross_entropy(net.logits(batch).transpose(1, 2), labels)

    with pytest.raises(RuntimeError, match="averages over .* in microbatch 1, but .* was computed.*microbatch_weight"):
        in_microbatches(step)


def test_inside_a_module_that_is_kept_out_nothing_is_watched() -> None:
    class WithLoss(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.cross_entropy(x.detach(), torch.zeros(len(x), dtype=torch.long))

    def step(net: Net, batch: Batch) -> Tensor:
        net.narrow.__class__ = WithLoss
        return net.narrow(batch["x"]).mean()

    assert in_microbatches(step)[2].terms == [None]
