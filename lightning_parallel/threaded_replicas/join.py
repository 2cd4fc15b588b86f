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
        outputs: one for each replica, of one structure. None is left out.
        samples: the number of samples of each replica.
        device: where the result is wanted.

    Raises:
        ValueError: a tensor has dimensions, but not as many rows as its replica had samples.
    """
    present = [(out, count) for out, count in zip(outputs, samples, strict=True) if out is not None]
    if not present:
        return None
    return _joined([out for out, _ in present], [count for _, count in present], device, "the output")


def _joined(parts: list[Any], samples: list[int], device: torch.device, path: str) -> Any:
    first = parts[0]
    if all(isinstance(part, Tensor) for part in parts):
        return _joined_tensors([part.to(device) for part in parts], samples, path)
    if all(isinstance(part, Real) and not isinstance(part, bool) for part in parts):
        if all(part == first for part in parts):
            return first
        return sum(part * count for part, count in zip(parts, samples, strict=True)) / sum(samples)
    if any(type(part) is not type(first) for part in parts):
        raise _Mismatch(f"The replicas' outputs differ: {path} is {_words(parts)}. Return the same for every batch.")
    structure = members(first)
    if structure is None:
        return first
    one_per_sample = isinstance(first, list) and all(len(p) == n for p, n in zip(parts, samples, strict=True))
    if one_per_sample and next(tensors(first), None) is None:
        return [item for part in parts for item in part]
    try:
        return _joined_children(parts, samples, device, path)
    except _Mismatch:
        if one_per_sample:
            return [mapped(item, lambda tensor: tensor.to(device)) for part in parts for item in part]
        raise


def _joined_children(parts: list[Any], samples: list[int], device: torch.device, path: str) -> Any:
    columns = [members(part) for part in parts]
    keys = [list(column[0]) for column in columns if column is not None]
    if any(each != keys[0] for each in keys):
        raise _Mismatch(f"The replicas' outputs differ: {path} has {_words(keys)}. Return the same for every batch.")
    rows = zip(*[column[1] for column in columns if column is not None], strict=True)
    children = [_joined(list(row), samples, device, f"{path}[{key!r}]") for key, row in zip(keys[0], rows, strict=True)]
    return rebuild(parts[0], keys[0], children)


def _joined_tensors(parts: list[Tensor], samples: list[int], path: str) -> Tensor:
    if all(part.dim() == 0 for part in parts):
        return weighted_mean(parts, samples)
    if all(part.dim() > 0 and part.shape[0] == count for part, count in zip(parts, samples, strict=True)):
        return torch.cat(parts)
    shapes = _words([tuple(part.shape) for part in parts])
    raise _Mismatch(
        f"What the replicas returned can't be joined: {path} has the shapes {shapes} for {_words(samples)} samples. "
        f"Return tensors with a row for each sample along dimension 0, or without dimensions."
    )


def _words(things: Sequence[Any]) -> str:
    return ", ".join(map(str, things))
