"""How late an asynchronous pipeline's gradients are, and how forwards are corrected for it, as plain formulas.

Stage s runs w forwards ahead of its backwards (`AsyncOneFOneB.warmup`), and updates after every m microbatches. A
gradient's staleness is the number of updates that its stage has done between the microbatch's forward and its
backward::

    weights       staleness in updates, once the pipeline is full       mean
    "stash"       floor(w / m) or ceil(w / m)                           w / m
    "latest"      the same, of the activations only                     w / m
    "2bw"         1, on every stage                                     1

In a V each chunk has updates of its own, and w / m is its mean staleness by its list
(``schedules/asynchronous_v.py``).

**Corrections.** Let u_t be the optimizer's own update of a stage (what it subtracts from the parameters v), and c the
stage's mean staleness. Forwards read

    "error_feedback"    r_t  =  v_t - c u_t
    "second_order"      r_t  =  v_t - c (1 + b) u_t + b (v_{t-1} - r_{t-1})       b = min(c, 0.9)

which are the parameters extrapolated to where they will be when the gradients meet them. Both hold one copy of the
stage's weights, r. Error feedback with c = 1 is arXiv:2606.30634's rule for a delay of one,
w <- w - u_t - c (u_t - u_{t-1}), with r for its w.

Why the last correction is used: an update's microbatches read r_{t-1} with the share c and r_t with the share 1 - c,
since c <= 1 of the m came before the last update. Their mean should be v_t. With q for "one update ago" and
r_t = v_t - H(q) u_t, that mean is off by

    u_t (c - H (1 - c + c q))       which is zero for  H = c / (1 - c (1 - q)) = c + c^2 (1 - q) + c^3 (1 - q)^2 + ...

Error feedback, H = c, leaves c^2 times the difference of two updates. Second order, H = c (1 + b) / (1 + b q) with
b = c, agrees with the series up to c^2 and leaves c^3 times a difference. The whole series as a recursion has its root
at -c / (1 - c), and amplifies noise without bound where c > 1/2. Second order's root is at -b, so what it starts with
dies away. (In 16-bit numbers b is at most 0.45: with more than 0.5, rounding would keep the last bit from dying away.)

Both take the last update for the next, which it resembles as far as the optimizer has momentum: without, a correction
does harm (docs/late-gradients.md).

The optimizer moves v alone. So weight decay, clipping, schedules, parameter groups, precision and every optimizer mean
what they mean without correction. Once the pipeline has drained nothing is late, and forwards read v itself. So a
validation and a checkpoint see v, and nothing of the correction needs to be saved.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_parallel.private.torch.tensors import add_all, differences, lerp_all
from lightning_parallel.settings import NotNegative

Stashing: TypeAlias = Literal["stash", "2bw", "latest"]
Correction: TypeAlias = Literal["error_feedback", "second_order"] | NotNegative | None

_MEMORY = 0.9  # b, at most
_MEMORY_OF_HALVES = 0.45  # and in 16-bit numbers, where half of the last place, rounded, would never die away


def mean_staleness(weights: Stashing, warmup: float, microbatches: int) -> float:
    """The mean staleness, in updates, over the microbatches of an update.

    Args:
        weights: which weights backwards use: ``"stash"``, ``"2bw"`` or ``"latest"``.
        warmup: the number of forwards that the stage runs ahead of its backwards.
        microbatches: the number of microbatches of an update.
    """
    return 1.0 if weights == "2bw" else warmup / microbatches


def correction_weight(correction: Correction, weights: Stashing, warmup: float, microbatches: int) -> float:
    """The weight c of a stage's correction: its mean staleness; or a user's own number, on every stage that has any
    staleness."""
    staleness = mean_staleness(weights, warmup, microbatches)
    if correction is None or staleness == 0:
        return 0.0
    return staleness if isinstance(correction, str) else float(correction)


def is_second_order(correction: Correction, weight: float) -> bool:
    """Is the last correction used too? Not if more than one update lies between."""
    return correction == "second_order" and 0 < weight <= 1


def extrapolate(before: list[Tensor], parameters: list[Tensor], read: list[Tensor] | None, weight: float) -> None:
    """Replace the values of ``before`` by r_t, which forwards read in the place of the parameters.

    All tensors have one dtype and device. With u_t = v_{t-1} - v_t, v_t - a u_t lies on the line from v_{t-1} through
    v_t, at 1 + a.

    Args:
        before: v_{t-1}, the parameters before the update.
        parameters: v_t, the parameters after it.
        read: r_{t-1}, what forwards have read so far; None for error feedback.
        weight: c, the stage's mean staleness in updates.
    """
    if read is None:
        lerp_all(before, parameters, 1 + weight)
        return
    memory = min(weight, _MEMORY if torch.finfo(before[0].dtype).bits >= 32 else _MEMORY_OF_HALVES)
    last = differences(before, read)
    lerp_all(before, parameters, 1 + weight * (1 + memory))
    add_all(before, last, alpha=memory)


def copies(weights: Stashing, correction: Correction, warmup: float, microbatches: int) -> int:
    """The most copies of a stage's weights that it holds besides its parameters."""
    weight = correction_weight(correction, weights, warmup, microbatches)
    late = 0 if weights == "latest" else math.ceil(mean_staleness(weights, warmup, microbatches))
    return late + (weight > 0)


def discount(staleness: float, update: int, until: int) -> float:
    """The factor of the learning rate at an update: PipeMare's T1 (arXiv:1910.05124, section 3.1).

    It is staleness^-q, with q = 1 - min(update / until, 1). Late stages start slowly, and are as fast as others from
    update ``until`` on. A stage that is less than one update late is not slowed down.

    Args:
        staleness: the stage's staleness, in updates.
        update: the update's number, from 0.
        until: the update at which the full rate is reached.
    """
    return float(max(1.0, staleness) ** -(1 - min(update / until, 1.0)))
