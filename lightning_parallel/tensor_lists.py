"""Many tensors at once: for each dtype and device a few kernels on a GPU, where a loop launches one for each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_parallel.private.torch.tensors import add_all, clone_all, scale_all


def alike(tensors: Sequence[Tensor], *others: Sequence[Any]) -> Iterator[list[Any]]:
    """Divide lists of one length by the dtypes and devices of the tensors in the first. For each dtype and device:
    the part of every list."""
    kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
    for kind in dict.fromkeys(kinds):  # in one order on all ranks
        if kinds.count(kind) == len(kinds):  # as nearly always
            yield [tensors, *others]
        else:
            yield [[x for x, its in zip(each, kinds, strict=True) if its == kind] for each in (tensors, *others)]


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of each tensor, by its name."""
    copies: dict[str, Tensor] = {}
    for group, names in alike([*tensors.values()], [*tensors]):
        copies.update(zip(names, clone_all(group), strict=True))
    return copies


def is_one(factor: float | Tensor) -> bool:
    """Is it known to be 1? A tensor isn't read: that would wait for its device."""
    return not isinstance(factor, Tensor) and factor == 1


def multiply(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place, unless the factor is known to be 1."""
    if not is_one(factor):
        for (group,) in alike(tensors):
            scale_all(group, factor)


def added(tensors: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums by name, in the memory of ``tensors`` where these have the name, else in that of ``more``."""
    both = tensors.keys() & more.keys()
    for sums, others in alike([tensors[name] for name in both], [more[name] for name in both]):
        add_all(sums, others)
    return {**more, **tensors}
