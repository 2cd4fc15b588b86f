"""Ways to write a loss: what is summed, what of it counts, and by what it is divided.

Each is a function of the losses of a batch's samples and positions, ``x [B, T]``, logits ``z [B, T, V]``, labels ``y
[B, T]`` (-100 where nothing counts), and the mask ``m [B, T]`` of what counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

POSITIONS, CLASSES = 3, 5
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# What of a batch counts, by the number of positions in each sample. Microbatches have two samples; of five samples
# they have two, one, one and one.
MASKS = {
    "all": [3, 3, 3, 3, 3, 3, 3, 3],
    "some": [3, 1, 2, 3, 1, 1, 3, 2],
    "a sample has none": [2, 0, 3, 1, 0, 2, 1, 3],
    "a microbatch has none": [1, 3, 0, 0, 2, 1, 3, 2],
    "the first microbatch has none": [0, 0, 2, 3, 1, 2, 3, 3],
    "the last microbatch has none": [3, 2, 1, 1, 2, 3, 0, 0],
    "one microbatch": [2, 3, 0, 0, 0, 0, 0, 0],
    "one position": [1, 0, 0, 0, 0, 0, 0, 0],
    "as many in each half": [1, 2, 2, 1, 3, 0, 0, 3],
    "nothing": [0, 0, 0, 0, 0, 0, 0, 0],
    "five samples": [3, 3, 3, 3, 3],
    "some of five samples": [1, 3, 2, 3, 1],
}

# Numerators: the sum of what counts.
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "(x * m).sum()": lambda x, m: (x * m).sum(),
    "x[m].sum()": lambda x, m: x[m].sum(),
    "einsum": lambda x, m: torch.einsum("bt,bt->", x, m.to(x)),
    "dot": lambda x, m: torch.dot(x.flatten(), m.to(x).flatten()),
    "nansum": lambda x, m: torch.where(m, x, torch.nan).nansum(),
    "sum over dims": lambda x, m: (x * m).sum(-1).sum(0),
    "python's sum": lambda x, m: sum(each[own].sum() for each, own in zip(x, m, strict=True)),
    "stack": lambda x, m: torch.stack([each[own].sum() for each, own in zip(x, m, strict=True)]).sum(),
}
# Denominators: how many count.
COUNTS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "m.sum()": lambda m: m.sum(),
    "item": lambda m: m.sum().item(),
    "clamp": lambda m: m.sum().clamp(min=1),
    "max": lambda m: max(int(m.sum()), 1),
    "eps": lambda m: m.sum() + 1e-12,
}
# What averages by itself.
MEANS: dict[str, Loss] = {
    "mean": lambda x, z, y, m: x.mean(),
    "x[m].mean()": lambda x, z, y, m: x[m].mean(),
    "mean of means over positions": lambda x, z, y, m: x.mean(1).mean(0),
    "mean over two dims": lambda x, z, y, m: (x * m).mean(dim=(0, 1)),
    "mean / mean": lambda x, z, y, m: (x * m).mean() / m.to(x).mean(),
    "each sample's mean": lambda x, z, y, m: ((x * m).sum(1) / m.sum(1).clamp(min=1)).mean(),
    "cat": lambda x, z, y, m: torch.cat([each[own] for each, own in zip(x, m, strict=True)]).mean(),
    "cross_entropy": lambda x, z, y, m: F.cross_entropy(z.transpose(1, 2), y),
    "cross_entropy, smoothed": lambda x, z, y, m: F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "cross_entropy with weights": lambda x, z, y, m: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 2, CLASSES, dtype=z.dtype)
    ),
    "cross_entropy / count": lambda x, z, y, m: (
        F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") / m.sum()
    ),
    "mse_loss": lambda x, z, y, m: F.mse_loss(z[m], torch.zeros_like(z[m])),
    "bce with logits": lambda x, z, y, m: F.binary_cross_entropy_with_logits(x, m.to(x)),
    "margin": lambda x, z, y, m: F.multi_margin_loss(z[m], y[m]),
    "sum / len": lambda x, z, y, m: x.sum() / len(x),
    "sum * (1 / len)": lambda x, z, y, m: x.sum() * (1 / len(x)),
    "half a mean": lambda x, z, y, m: 0.5 * x[m].mean(),
    "negative": lambda x, z, y, m: -(-(x * m)).sum() / m.sum(),
    "divided before the sum": lambda x, z, y, m: (x * m / m.sum()).sum(),
    "a sum": lambda x, z, y, m: (x * m).sum(),
    "two means of the same": lambda x, z, y, m: x[m].mean() + 0.1 * z[m].pow(2).mean(),
    "two means of the same size": lambda x, z, y, m: x.mean() + z.pow(2).mean(),
    # No sum over samples, or two of different numbers: these are warned of.
    "a root": lambda x, z, y, m: x.pow(2).mean().sqrt(),
    "smoothed": lambda x, z, y, m: (x * m).sum() / (m.sum() + 1),
    "two means": lambda x, z, y, m: x[m].mean() + z.pow(2).mean(),
    # Weighted by zeros.
    "cross_entropy with weights of zero": lambda x, z, y, m: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), weight=torch.arange(CLASSES, dtype=z.dtype) % 2
    ),
    "cross_entropy of masked logits": lambda x, z, y, m: F.cross_entropy((z * m[..., None]).flatten(0, 1), y.flatten()),
    "bce, weighted sum": lambda x, z, y, m: (
        F.binary_cross_entropy_with_logits(x, m.to(x), weight=m.to(x), reduction="sum") / m.sum()
    ),
}


class _Mean(torch.autograd.Function):
    """A mean whose graph doesn't tell over how many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum() / x.numel()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(ctx.shape) / ctx.shape.numel()


# Means beside numbers that don't depend on how many samples there are. They have learned factors ``s [2]``, too.
LEARNED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "uncertainty": lambda s, x, z, m: 0.5 * torch.exp(-s[0]) * x.mean() + 0.5 * s[0],
    "uncertainty of what counts": lambda s, x, z, m: torch.exp(-s[0]) * x[m].mean() + 0.5 * s[0],
    "uncertainties of a stack": lambda s, x, z, m: (
        (0.5 * torch.exp(-s) * torch.stack([x.mean(), z.pow(2).mean()])).sum() + 0.5 * s.sum()
    ),
    "shares of a stack": lambda s, x, z, m: (
        (s.softmax(0) * torch.stack([x.mean(), z.pow(2).mean()])).sum() + 0.01 * s.abs().sum()
    ),
    "mean of squared weights": lambda s, x, z, m: s.square().mean() + torch.exp(-s[0]) * x.mean(),
    "mean of squared weights beside what counts": lambda s, x, z, m: s.square().mean() + x[m].mean(),
    "what counts, and absolute weights": lambda s, x, z, m: (x * m).sum() * (1 / m.sum()) + 0.1 * s.abs().sum(),
    "a function of one's own, and decay": lambda s, x, z, m: _Mean.apply(x) + 1e-2 * s.square().sum(),
}

# Of losses, weights and what counts that each sample has one of (its first position's). All equal one process.
OF_SAMPLES: dict[str, Loss] = {
    "masked": lambda x, z, y, m: (x[:, 0] * m[:, 0]).sum() / m[:, 0].sum(),
    "clamped": lambda x, z, y, m: (x[:, 0] * m[:, 0]).sum() / m[:, 0].sum().clamp(min=1),
    "eps": lambda x, z, y, m: (x[:, 0] * m[:, 0]).sum() / (m[:, 0].sum() + 1e-12),
    "weighted": lambda x, z, y, m: (x[:, 0] * (y[:, 0] + 200.0)).sum() / (y[:, 0] + 200.0).sum(),
    "weighted before the sum": lambda x, z, y, m: (x[:, 0] * (y[:, 0] + 200.0) / (y[:, 0] + 200.0).sum()).sum(),
    "chosen and weighted": lambda x, z, y, m: (x[m] * (y[m] + 1.0)).sum() / (y[m] + 1.0).sum(),
    "a factor of one number": lambda x, z, y, m: (x[:, 0] * m[:, 0] * x.new_full((1,), 0.5)).sum() / m[:, 0].sum(),
    "mean, times one number": lambda x, z, y, m: (x[:, 0].mean() * x.new_full((1,), 0.5)).squeeze(),
}


def _divided(total: Callable[[Tensor, Tensor], Tensor], count: Callable[[Tensor], Tensor | float]) -> Loss:
    return lambda x, z, y, m: total(x, m) / count(m)


# Each sum, each count, and what averages by itself.
FORMS = {f"{s} / {c}": _divided(SUMS[s], COUNTS[c]) for s, c in zip(SUMS, [*COUNTS, *COUNTS], strict=False)} | MEANS


def batch_of(mask: str, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels, and what counts."""
    generator = torch.Generator().manual_seed(seed)
    m = torch.arange(POSITIONS) < torch.tensor(MASKS[mask])[:, None]
    x = torch.randn(len(m), POSITIONS, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, m.shape, generator=generator).masked_fill(~m, -100)
    return x, y, m


# -- as papers and libraries write them ------------------------------------------------------------------------------

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


def _by_class(x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    found = [x[m & (y == label)].mean() for label in range(CLASSES) if (m & (y == label)).any()]
    return torch.stack(found).mean() if found else x.sum() * 0


def _means(x: Tensor, m: Tensor) -> list[Tensor]:
    return [each[own].mean() for each, own in zip(x, m, strict=True) if own.any()]


IDIOMS: dict[str, Loss] = {
    # What counts, and what stands in where nothing does.
    "skipped": lambda x, z, y, m: (x * m).sum() / m.sum() if m.any() else x.sum() * 0.0,
    "skipped with a constant": lambda x, z, y, m: (x * m).sum() / m.sum() if m.any() else x.new_zeros(()),
    "skipped with a leaf": lambda x, z, y, m: (
        (x * m).sum() / m.sum() if m.any() else torch.zeros((), requires_grad=True)
    ),
    "skipped, no number": lambda x, z, y, m: x[m].mean().nan_to_num(),
    "where": lambda x, z, y, m: torch.where(m.any(), (x * m).sum() / _count(m), 0.0),
    "mean of a list": lambda x, z, y, m: torch.stack(_means(x, m)).mean() if m.any() else x.sum() * 0,
    # Divided in other words.
    "power": lambda x, z, y, m: (x * m).sum() * m.sum().double().pow(-1),
    "addcdiv": lambda x, z, y, m: torch.addcdiv(torch.zeros(()), (x * m).sum(), m.sum().double()),
    # Segmentation and detection.
    "means of classes": lambda x, z, y, m: _by_class(x, y, m),
    "hard examples": lambda x, z, y, m: x.flatten().topk(max(1, x.numel() // 4)).values.mean(),
    # Language models.
    "auxiliary term under a branch": lambda x, z, y, m: x.mean() + 0.1 * x[m].mean() if m.any() else x.mean(),
    # Terms of their own.
    "kl by samples beside a masked mean": lambda x, z, y, m: (
        (x[m].mean() if m.any() else x.sum() * 0) + 0.1 * z.pow(2).sum() / len(z)
    ),
    "sum and mean": lambda x, z, y, m: x.sum() + z.pow(2).mean(),
    "flooding": lambda x, z, y, m: (x.mean() - 1.0).abs() + 1.0,
    "balanced terms": lambda x, z, y, m: x.mean() + z.pow(2).mean() * (x.mean() / z.pow(2).mean()).detach(),
    # Statistics of the batch.
    "deviation": lambda x, z, y, m: x.mean() + 0.1 * z.std(),
    "contrasted samples": lambda x, z, y, m: F.cross_entropy(z[:, 0] @ z[:, 1].T, torch.arange(len(z))),
}
