"""What ranks that write or read one checkpoint have to agree on, and how they fail: together, or not at all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.slices import Slices

Group = dist.ProcessGroup | None
Shape = tuple[tuple[int, ...], torch.dtype]
T = TypeVar("T")

_SHOWN = 5  # names in an error message


def gather(value: T, group: Group) -> list[T]:
    """The values of all ranks, on all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def together(group: Group, action: Callable[[], T]) -> T:
    """Run `action`; if it fails on one rank, raise on all: none may go on to wait for one that has left."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # any: it is raised below, when the others know
        error = caught
    reports = gather(None if error is None else (type(error), str(error)), group)
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            kind = ValueError if issubclass(report[0], ValueError) else RuntimeError
            raise kind(f"rank {rank}: {report[1]}")
    return result


def first_few(names: Iterable[str]) -> str:
    """Some of the names, for an error message."""
    names = list(names)
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@dataclass(frozen=True, slots=True)
class Share:
    """What the others have to know of a rank that saves.

    Attributes:
        partial: where it would write; the first rank's counts.
        coordinate: its place in the layout.
        shapes: of its tensors, by key.
        scalars: its optimizer's state that is no tensor, by parameter.
        param_groups: its optimizer's groups: options, and under "params" names.
    """

    partial: str
    coordinate: str
    shapes: dict[str, Shape]
    scalars: dict[str, dict[str, Any]]
    param_groups: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        partial: str,
        coordinate: str,
        tensors: Mapping[str, Tensor],
        scalars: dict[str, dict[str, Any]],
        param_groups: Sequence[Mapping[str, Any]],
    ) -> Share:
        """The share of a rank that holds these tensors."""
        shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        return cls(partial, coordinate, shapes, scalars, [dict(options) for options in param_groups])


def check_shapes(shares: Sequence[Share]) -> None:
    """Refuse ranks that share a coordinate, and keys that stand for different tensors on different ranks."""
    twice = [place for place, count in Counter(share.coordinate for share in shares).items() if count > 1]
    if twice:
        raise ValueError(f"coordinate={twice[0]!r} is given by several ranks: each needs its own")
    known: dict[str, Shape] = {}
    for share in shares:
        for key, shape in share.shapes.items():
            if known.setdefault(key, shape) != shape:
                raise ValueError(
                    f"{key} is {known[key]} on one rank and {shape} on another: a checkpoint holds one of each name"
                )


def check_copies(model: Mapping[str, Tensor], parameters: set[str], shares: Sequence[Share], group: Group) -> None:
    """Refuse copies of a parameter that have drifted apart: one would be lost without a word. Every rank calls."""
    held = Counter(name for name in parameters for share in shares if f"model/{name}" in share.shapes)
    copied = {name for name, count in held.items() if count > 1}
    if not copied:
        return
    digests = {
        name: _digest(tensor)
        for name, tensor in model.items()
        if name in copied and not isinstance(tensor, (DTensor, Slices))
    }
    known: dict[str, bytes] = {}
    differing = [
        name
        for digests_there in gather(digests, group)
        for name, digest in digests_there.items()
        if known.setdefault(name, digest) != digest
    ]
    if differing:
        raise RuntimeError(f"copies of one parameter differ between ranks, nothing is saved: {first_few(differing)}")


def _digest(tensor: Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).digest()


def merge_groups(ranks: list[list[dict[str, Any]]], order: Sequence[str]) -> list[dict[str, Any]]:
    """The optimizer's groups as one process with the whole model would have them.

    Args:
        ranks: the groups of each rank: options, and under "params" names.
        order: all names in the order of the model; those that it lacks come last, rank after rank.

    Raises:
        ValueError: the ranks have different numbers of groups, or give different values to an option.
    """
    counts = [len(groups) for groups in ranks]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the optimizers of the ranks have {counts} parameter groups: configure_optimizers has to make the "
            "same groups on every rank, empty where a rank holds none of a group's parameters"
        )
    position = {name: place for place, name in enumerate(order)}
    merged = []
    for index, copies in enumerate(zip(*ranks, strict=True)):
        options = {key: value for key, value in copies[0].items() if key != "params"}
        for copy in copies[1:]:
            other = {key: value for key, value in copy.items() if key != "params"}
            differing = [key for key in options.keys() | other.keys() if not _equal(options, other, key)]
            if differing:
                key = min(differing)
                raise ValueError(
                    f"parameter group {index} has {key}={options.get(key)!r} on one rank and "
                    f"{other.get(key)!r} on another: a checkpoint holds one value of each option"
                )
        names = list(dict.fromkeys(name for copy in copies for name in copy["params"]))
        names.sort(key=lambda name: position.get(name, len(position)))
        merged.append({**options, "params": names})
    return merged


def _equal(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    if key not in one or key not in other:
        return False
    a, b = one[key], other[key]
    if isinstance(a, Tensor) or isinstance(b, Tensor):  # a learning rate for compiled or captured optimizers
        return float(a) == float(b)
    return bool(a == b)
