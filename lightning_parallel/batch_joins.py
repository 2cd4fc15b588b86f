"""Joins what a step returned for parts of a batch into what it would have returned for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.batch import mapped, members, one_per_sample, rebuild


class _Mismatch(ValueError):
    """Outputs can't be joined."""


def join_outputs(outputs: Sequence[Any], weights: Sequence[int], *, strict: bool = False) -> Any:
    """What a step returned for each part of a batch, as it would have returned it for the whole batch. ``weights`` are
    the sizes of the parts.

    Numbers and tensors without dimensions become their mean, weighted by size. Tensors whose dimension 0 is the size of
    their part are concatenated. Containers are joined element by element; lists with an item for each sample that can't
    be joined so are concatenated, such as texts, or a dictionary of boxes for each sample.

    By default tensors are detached, parts that returned None don't count, and of anything else the last one is taken.
    If ``strict``, tensors keep their graph, and of other objects the first one is taken.

    Raises:
        ValueError: if ``strict``, some are None, structures differ, or a tensor hasn't as many rows as its part has
            samples.
    """
    assert len(outputs) == len(weights), f"{len(outputs)} outputs of {len(weights)} parts"
    missing = sum(output is None for output in outputs)
    if strict and 0 < missing < len(outputs):
        raise ValueError(
            f"The step returned None for the share of {missing} of {len(outputs)} replicas, so it would skip a part of "
            f"the batch. Decide by the whole batch: return None in all of them, or use strategy='ddp'."
        )
    parts = outputs if strict else [mapped(output, Tensor.detach) for output in outputs]
    return _join(parts, weights, "the output", strict)


def _join(parts: Sequence[Any], counts: Sequence[int], path: str, strict: bool) -> Any:
    present = [k for k, part in enumerate(parts) if strict or part is not None]
    if not present:
        return None
    parts, counts = [parts[k] for k in present], [counts[k] for k in present]
    if all(isinstance(part, Real) and not isinstance(part, bool) for part in parts):
        same = all(part == parts[0] for part in parts)
        return parts[0] if same else sum(p * n for p, n in zip(parts, counts, strict=True)) / sum(counts)
    in_list = all(type(part) is list and len(part) == n for part, n in zip(parts, counts, strict=True))
    try:
        if all(isinstance(part, Tensor) for part in parts):
            return _join_tensors(parts, counts, path)
        if all(one_per_sample(part, n) for part, n in zip(parts, counts, strict=True)):
            return type(parts[0])(item for part in parts for item in part)
        return _join_members(parts, counts, path, strict or in_list)
    except _Mismatch:
        if in_list:
            return [item for part in parts for item in part]
        if strict:
            raise
        return parts[-1]


def _join_members(parts: list[Any], counts: list[int], path: str, strict: bool) -> Any:
    structures = [members(part) for part in parts]
    keys = [structure and list(structure[0]) for structure in structures]
    if any(type(part) is not type(parts[0]) for part in parts) or any(each != keys[0] for each in keys):
        found = ", ".join(map(str, parts if keys[0] is None else keys))
        raise _Mismatch(f"The replicas' outputs differ: {path} has {found}. Return the same for every batch.")
    if keys[0] is None:
        return parts[0 if strict else -1]
    rows = zip(*[structure[1] for structure in structures if structure is not None], strict=True)
    values = [_join(row, counts, f"{path}[{name!r}]", strict) for name, row in zip(keys[0], rows, strict=True)]
    return rebuild(parts[-1], keys[0], values)


def _join_tensors(parts: list[Tensor], counts: list[int], path: str) -> Tensor:
    if all(part.dim() == 0 for part in parts):
        return weighted_mean(parts, counts)
    if all(part.dim() > 0 and part.shape[0] == count for part, count in zip(parts, counts, strict=True)):
        return torch.cat(parts)
    shapes, lengths = (", ".join(map(str, each)) for each in ([tuple(part.shape) for part in parts], counts))
    raise _Mismatch(
        f"What the replicas returned can't be joined: {path} has the shapes {shapes} for {lengths} samples. Return "
        f"tensors with a row for each sample along dimension 0, or without dimensions."
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """The mean of scalars. 16-bit and integer ones become float32. What weighs nothing doesn't count, even if it is NaN
    or infinite."""
    exact = [value if value.dtype in (torch.float32, torch.float64) else value.float() for value in values]
    if len(exact) == 1:
        return exact[0]  # to the bit
    counting = [
        (torch.where(weight == 0, 0.0, value) if isinstance(weight, Tensor) else value, weight)
        for value, weight in zip(exact, weights, strict=True)
        if isinstance(weight, Tensor) or weight
    ]
    if not counting:
        return exact[0]  # 0 / 0, as in one process
    total = sum(value.double() * weight for value, weight in counting)
    assert isinstance(total, Tensor)
    return (total / sum(weights)).to(exact[0].dtype)
