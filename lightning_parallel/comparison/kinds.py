"""What a wrong tensor looks like: a multiple of the right one, a sum that lacks a microbatch, ...

A kind is given only where it explains every entry of the tensor, and where a tensor of other numbers wouldn't fit it by
chance. Of others nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

OWN_PART = "each rank's own part, and their sum is right"
_FEW = 3  # entries, of which any might be explained


def kind_of(
    found: Tensor,
    right: Tensor,
    tolerance: float,
    *,
    others: Mapping[str, Tensor] | None = None,
    ranks: Sequence[Tensor] = (),
    parts: Mapping[str, Tensor] | None = None,
) -> str | None:
    """What a wrong tensor looks like, in words; None if that can't be told.

    Args:
        found: ``[...]``, as ``right``.
        tolerance: relative to the largest entry.
        others: what could stand in its place, by what it is.
        ranks: what the ranks have of it, all of them of the same shape.
        parts: the summands of ``right``, by what they come from.
    """
    found, right = found.double(), right.double()

    def same(one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and bool((one - other).abs().max() <= tolerance * other.abs().max())

    if found.shape != right.shape or found.numel() < _FEW or not bool(found.isfinite().all()):
        return None
    if not found.any():
        return "zeros"
    for what, other in (others or {}).items():
        if same(found, other.double()):
            return what
    if len(ranks) > 1 and not all(same(each.double(), ranks[0].double()) for each in ranks[1:]):
        total = torch.stack([each.double() for each in ranks]).sum(0)
        if same(total, right):
            return OWN_PART
        if same(total / len(ranks), right):
            return "each rank's own, and their mean is right"
    ratio = float((found * right).sum() / (right * right).sum())
    if same(found, ratio * right):
        return f"a scale: {ratio:.6g} times"
    return _sum_of_parts(found, parts or {}, same) or _of_entries(found, right, tolerance)


def _sum_of_parts(found: Tensor, parts: Mapping[str, Tensor], same: Callable[[Tensor, Tensor], bool]) -> str | None:
    """Which parts are in it, if all that are in it are so equally often; or which one isn't in it once."""
    if len(parts) < 2 or found.numel() < 2 * len(parts):
        return None
    columns = torch.stack([part.double().flatten() for part in parts.values()], 1)  # [entries, parts]
    sizes = torch.linalg.svdvals(columns)
    if sizes[-1] <= 1e-6 * sizes[0]:
        return None  # some parts look like others
    counts = torch.linalg.lstsq(columns, found.flatten()).solution
    if not same(columns @ counts, found.flatten()):
        return None
    often = dict(zip(parts, counts.tolist(), strict=True))
    there = {name: count for name, count in often.items() if abs(count) > 1e-6}
    once = [name for name, count in there.items() if abs(count - 1) < 1e-6]
    missing = [name for name in often if name not in there]
    if len(once) == len(there):
        return f"{' and '.join(missing)} missing" if len(missing) < len(often) / 2 else f"{' and '.join(once)} alone"
    if len(once) == len(often) - 1:
        ((name, count),) = [(name, count) for name, count in often.items() if name not in once]
        return f"{name}, {count:.6g} times"
    count = next(iter(there.values()))
    if missing and all(abs(each - count) < 1e-6 * abs(count) for each in there.values()):
        return f"{' and '.join(there)} alone, {count:.6g} times"
    return None


def _of_entries(found: Tensor, right: Tensor, tolerance: float) -> str | None:
    wrong = (found - right).abs() > tolerance * right.abs().max()
    if int(wrong.sum()) == 1:
        index = tuple(wrong.nonzero()[0].tolist())
        return f"one wrong entry, {list(index)}"
    # Where a mask drops other entries, and keeps the rest, each wrong entry is zero on one side.
    gone, come = wrong & (found == 0), wrong & (right == 0)
    if bool(gone.any()) and bool(come.any()) and bool((gone | come == wrong).all()):
        return "noise: other entries are zero, as by another dropout mask"
    return None
