"""The replicas' outputs, joined into what the model would have returned for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.batch import mapped, members, rebuild, tensors, weighted_mean


class _Mismatch(ValueError):
    pass


def joined(outputs: Sequence[Any], samples: Sequence[int], device: torch.device) -> Any:
    """Join outputs on ``device``, differentiably.

    Tensors whose dimension 0 is the replica's number of samples are concatenated. So are lists of that length of things
    that can't be joined one by one: a sentence or a dictionary of boxes for each sample. Numbers and tensors without
    dimensions become their mean, weighted by samples. Mappings, tuples, lists and dataclasses are joined element by
    element. Of anything else, what replica 0 returned is taken.

    Args:
        outputs: one for each replica, of one structure. None of all of them is None.
        samples: the number of samples of each replica.
        device: where the result is wanted.

    Raises:
        ValueError: a tensor has dimensions, but not as many rows as its replica had samples; or some are None.
    """
    present = [k for k, output in enumerate(outputs) if output is not None]
    if 0 < len(present) < len(outputs):
        raise ValueError(
            f"The step returned None for the share of {len(outputs) - len(present)} of {len(outputs)} replicas, so it "
            f"would skip a part of the batch. Decide by the whole batch: return None in all of them, or use "
            f"loss_on='output_device'."
        )
    moved = [mapped(outputs[k], lambda tensor: tensor.to(device)) for k in present]
    return _joined(moved, [samples[k] for k in present], "the output") if present else None


def _joined(parts: list[Any], samples: list[int], path: str) -> Any:
    first = parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return _joined_tensors(parts, samples, path)
    if all(isinstance(part, Real) and not isinstance(part, bool) for part in parts):
        same = all(part == first for part in parts)
        return first if same else sum(p * n for p, n in zip(parts, samples, strict=True)) / sum(samples)
    structures = [members(part) for part in parts]
    keys = [structure and list(structure[0]) for structure in structures]
    one_per_sample = isinstance(first, list) and all(
        isinstance(part, list) and len(part) == count for part, count in zip(parts, samples, strict=True)
    )
    try:
        if any(type(part) is not type(first) for part in parts) or any(each != keys[0] for each in keys):
            found = ", ".join(map(str, parts if keys[0] is None else keys))
            raise _Mismatch(f"The replicas' outputs differ: {path} has {found}. Return the same for every batch.")
        if structures[0] is None:
            return first
        if one_per_sample and next(tensors(first), None) is None:
            raise _Mismatch
        rows = zip(*[structure[1] for structure in structures if structure is not None], strict=True)
        names = structures[0][0]
        values = [_joined([*row], samples, f"{path}[{name!r}]") for name, row in zip(names, rows, strict=True)]
        return rebuild(first, names, values)
    except _Mismatch:
        if one_per_sample:
            return [item for part in parts for item in part]
        raise


def _joined_tensors(parts: list[Tensor], samples: list[int], path: str) -> Tensor:
    if all(part.dim() == 0 for part in parts):
        return weighted_mean(parts, samples)
    if all(part.dim() > 0 and part.shape[0] == count for part, count in zip(parts, samples, strict=True)):
        return torch.cat(parts)
    shapes, counts = (", ".join(map(str, each)) for each in ([tuple(part.shape) for part in parts], samples))
    raise _Mismatch(
        f"What the replicas returned can't be joined: {path} has the shapes {shapes} for {counts} samples. Return "
        f"tensors with a row for each sample along dimension 0, or without dimensions."
    )
