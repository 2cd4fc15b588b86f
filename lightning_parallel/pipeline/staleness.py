"""How late an asynchronous pipeline's gradients are, and what is done about it: the rules, as plain formulas.

Stage s runs w forwards ahead of its backwards (`AsyncOneFOneB.warmup`), and updates after every m microbatches. A
gradient is as stale as the updates that its stage has done between the microbatch's forward and its backward:

    weights       staleness in updates, once the pipeline is full       mean
    "stash"       floor(w / m) or ceil(w / m)                           w / m
    "latest"      the same, of the activations only                     w / m
    "2bw"         1, on every stage                                     1

**Corrections.** With u_t the optimizer's own update of a stage (what it subtracts from the parameters v) and c the
stage's mean staleness, forwards read

    "error_feedback"    r_t  =  v_t - c u_t
    "second_order"      r_t  =  v_t - c (1 + b) u_t + b (v_{t-1} - r_{t-1})       b = min(c, 0.9)

the parameters extrapolated to where they will be when the gradients meet them. Both hold one copy of the stage's
weights, r. Error feedback with c = 1 is arXiv:2606.30634's rule for a delay of one, w <- w - u_t - c (u_t - u_{t-1}),
with r for its w.

Why the last correction comes in. An update's microbatches read r_{t-1} with the share c and r_t with the share 1 - c,
since c <= 1 of the m came before the last update. Their mean should be v_t. With q for "one update ago" and
r_t = v_t - H(q) u_t, that mean is off by

    u_t (c - H (1 - c + c q))       which is zero for  H = c / (1 - c (1 - q)) = c + c^2 (1 - q) + c^3 (1 - q)^2 + ...

Error feedback, H = c, leaves c^2 times the difference of two updates. Second order, H = c (1 + b) / (1 + b q) with
b = c, agrees with the series up to c^2 and leaves c^3 times a difference. The whole series as a recursion has its root
at -c / (1 - c), and amplifies noise without bound where c > 1/2; second order's is at -b, so that what it starts with
dies away. (In 16-bit numbers b is 0.45 at most: a last place times more than a half would be rounded up again.)

The optimizer moves v alone, as ever: weight decay, clipping, schedules, parameter groups, precision and every optimizer
mean what they mean without correction. Once the pipeline has drained nothing is late, and forwards read v itself. So a
validation and a checkpoint see v, and nothing of the correction needs to be saved.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Stashing: TypeAlias = Literal["stash", "2bw", "latest"]
Correction: TypeAlias = Literal["error_feedback", "second_order"] | float | None

_MEMORY = 0.9  # b, at most
_MEMORY_OF_HALVES = 0.45  # and of 16-bit numbers, where half of the last place, rounded, would never die away


def mean_staleness(weights: Stashing, warmup: int, microbatches: int) -> float:
    """Updates, in the mean over the microbatches of an update, of a stage that runs ``warmup`` forwards ahead."""
    return 1.0 if weights == "2bw" else warmup / microbatches


def correction_weight(correction: Correction, weights: Stashing, warmup: int, microbatches: int) -> float:
    """c of a stage: its mean staleness; or a user's own number, on every stage that has any."""
    staleness = mean_staleness(weights, warmup, microbatches)
    if correction is None or staleness == 0:
        return 0.0
    return staleness if isinstance(correction, str) else float(correction)


def is_second_order(correction: Correction, weight: float) -> bool:
    """Is the last correction used too? Not where more than an update lies between."""
    return correction == "second_order" and 0 < weight <= 1


def extrapolate(parameter: Tensor, update: Tensor, last: Tensor | None, weight: float) -> Tensor:
    """What forwards read in place of a parameter, as a new tensor.

    Args:
        parameter: v_t, after the update.
        update: u_t, what was subtracted from it.
        last: v_{t-1} - r_{t-1}, the correction before; None: first order.
        weight: c.
    """
    if last is None:
        return torch.sub(parameter, update, alpha=weight)
    memory = min(weight, _MEMORY if torch.finfo(parameter.dtype).bits >= 32 else _MEMORY_OF_HALVES)
    return torch.sub(parameter, update, alpha=weight * (1 + memory)).add_(last, alpha=memory)


def copies(weights: Stashing, correction: Correction, warmup: int, microbatches: int) -> int:
    """Of a stage's weights, at most, beside its parameters."""
    weight = correction_weight(correction, weights, warmup, microbatches)
    late = 0 if weights == "latest" else math.ceil(mean_staleness(weights, warmup, microbatches))
    return late + (weight > 0)


def known_cost(correction: Correction, staleness: float) -> str | None:
    """What is known to be lost with gradients of the first stage so late, in figures; None: nothing to speak of.

    From recipes/study: 8 stages, AdamW, Muon and NAdam, 1000 updates, against the synchronous loss.
    """
    if staleness > 1:
        return "Updates of one microbatch, 7 updates late, ended 22 to 30 % above the synchronous loss."
    if correction is None and staleness > 0.5:
        return "Without a correction, gradients 0.9 to 1 update late ended 2 to 12 % above the synchronous loss."
    return None


def discount(staleness: float, update: int, until: int | None) -> float:
    """Factor of the learning rate at ``update`` (from 0): PipeMare's T1 (arXiv:1910.05124, section 3.1).

    staleness^-q, q = 1 - min(update / until, 1): late stages start slowly, and are as fast as others from update
    ``until`` on. A stage that is less than one update late is not slowed down.
    """
    if until is None:
        return 1.0
    return float(max(1.0, staleness) ** -(1 - min(update / until, 1.0)))
