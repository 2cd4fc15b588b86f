"""Losses as papers and libraries write them, as functions of what ``spellings.py`` describes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.strategies.spellings import CLASSES, POSITIONS, Loss

# What counts in the batches of a run, by the names of masks: rules that hold for one may not hold for the next.
SEQUENCES = (
    ("all", "some"),
    ("all", "a microbatch has none", "some"),
    ("the first microbatch has none", "some"),
    ("one position", "some"),
    ("as many in each half", "all", "some", "a microbatch has none"),
    ("one microbatch", "all", "some"),
    ("the last microbatch has none", "a microbatch has none", "the first microbatch has none"),
    ("all", "all", "all", "one position", "some"),
    ("some", "nothing", "all"),
)


def _count(m: Tensor) -> Tensor:
    return m.sum().clamp(min=1)


def _by_sample(x: Tensor, m: Tensor) -> Tensor:
    return (x * m).sum(1) / m.sum(1).clamp(min=1)


def _dice(z: Tensor, m: Tensor) -> Tensor:
    p = z.sigmoid()[..., 0]
    return 1 - (2 * (p * m).sum() + 1) / ((p + m).sum() + 1)


def _by_class(x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    found = [x[m & (y == label)].mean() for label in range(CLASSES) if (m & (y == label)).any()]
    return torch.stack(found).mean() if found else x.sum() * 0


def _means(x: Tensor, m: Tensor) -> list[Tensor]:
    return [each[own].mean() for each, own in zip(x, m, strict=True) if own.any()]


def _counted_on_the_way(x: Tensor, m: Tensor) -> Tensor:
    total, count = x.new_zeros(()), 0
    for each, own in zip(x, m, strict=True):
        total = total + each[own].sum()
        count += int(own.sum())
    return total / max(count, 1)


IDIOMS: dict[str, Loss] = {
    # What counts, and what stands in where nothing does.
    "skipped": lambda x, z, y, m: (x * m).sum() / m.sum() if m.any() else x.sum() * 0.0,
    "skipped with a constant": lambda x, z, y, m: (x * m).sum() / m.sum() if m.any() else x.new_zeros(()),
    "skipped with a leaf": lambda x, z, y, m: (
        (x * m).sum() / m.sum() if m.any() else torch.zeros((), requires_grad=True)
    ),
    "skipped, no number": lambda x, z, y, m: x[m].mean().nan_to_num(),
    "where": lambda x, z, y, m: torch.where(m.any(), (x * m).sum() / _count(m), 0.0),
    "counted on the way": lambda x, z, y, m: _counted_on_the_way(x, m),
    "mean of a list": lambda x, z, y, m: torch.stack(_means(x, m)).mean() if m.any() else x.sum() * 0,
    "mean over samples in which any counts": lambda x, z, y, m: _by_sample(x, m).sum() / _count(m.any(1)),
    # Divided in other words.
    "power": lambda x, z, y, m: (x * m).sum() * m.sum().double().pow(-1),
    "addcdiv": lambda x, z, y, m: torch.addcdiv(torch.zeros(()), (x * m).sum(), m.sum().double()),
    "lerp": lambda x, z, y, m: torch.lerp(x.mean(), z.pow(2).mean(), 0.3),
    # Segmentation and detection.
    "dice": lambda x, z, y, m: _dice(z, m),
    "means of classes": lambda x, z, y, m: _by_class(x, y, m),
    "hard examples": lambda x, z, y, m: x.flatten().topk(max(1, x.numel() // 4)).values.mean(),
    "above a threshold": lambda x, z, y, m: x[x > 1.5].mean() if (x > 1.5).any() else x.sum() * 0,
    # Language models.
    "auxiliary term under a branch": lambda x, z, y, m: x.mean() + 0.1 * x[m].mean() if m.any() else x.mean(),
    "load balance": lambda x, z, y, m: (
        x.mean() + (z.softmax(-1).mean((0, 1)) * F.one_hot(z.argmax(-1), CLASSES).double().mean((0, 1))).sum()
    ),
    "several tokens ahead": lambda x, z, y, m: sum(  # type: ignore[return-value]
        F.cross_entropy(z[:, k], y[:, k], reduction="sum") / _count(m[:, k]) for k in range(POSITIONS)
    ),
    # Terms of their own.
    "kl by samples beside a masked mean": lambda x, z, y, m: (
        (x[m].mean() if m.any() else x.sum() * 0) + 0.1 * z.pow(2).sum() / len(z)
    ),
    "sum and mean": lambda x, z, y, m: x.sum() + z.pow(2).mean(),
    "flooding": lambda x, z, y, m: (x.mean() - 1.0).abs() + 1.0,
    "free bits": lambda x, z, y, m: x.mean() + z.pow(2).mean().clamp(min=0.5),
    "balanced terms": lambda x, z, y, m: x.mean() + z.pow(2).mean() * (x.mean() / z.pow(2).mean()).detach(),
    # Statistics of the batch.
    "deviation": lambda x, z, y, m: x.mean() + 0.1 * z.std(),
    "without the batch's mean": lambda x, z, y, m: (z - z.mean(0)).pow(2).mean(),
    "advantages": lambda x, z, y, m: (x * (x.detach() - x.detach().mean())).mean(),
    "contrasted samples": lambda x, z, y, m: F.cross_entropy(z[:, 0] @ z[:, 1].T, torch.arange(len(z))),
    "mixed with another sample": lambda x, z, y, m: F.cross_entropy(z[:, 0], y[:, 0].clamp(min=0).flip(0)),
}
