"""What the ranks that write one checkpoint must agree on. The first rank compares what the others send it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.checkpoint.slices import Boxes

Shape = tuple[tuple[int, ...], torch.dtype]

_PARTS = 64  # of a tensor, in its digest
_SHOWN = 5  # names in an error message


def first_few(names: Iterable[str]) -> str:
    """The first few of some names, for an error message."""
    names = list(names)
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What the first rank has to know of a rank that saves.

    Attributes:
        coordinate: the rank's place in the layout, such as ``pp0.dp0.tp0``.
        shapes: the shapes of its tensors, by key.
        scalars: for each optimizer its state that isn't a tensor, by parameter.
        param_groups: for each optimizer its groups: options, and the names of the parameters under "params".
        own_options: the options that may have other values on other ranks.
        extra_state: what modules here keep besides parameters and buffers, by its name in the ``state_dict``.
    """

    coordinate: str
    shapes: dict[str, Shape]
    scalars: list[dict[str, dict[str, Any]]]
    param_groups: list[list[dict[str, Any]]]
    own_options: frozenset[str]
    extra_state: dict[str, Any]

    @classmethod
    def of(
        cls,
        coordinate: str,
        tensors: Mapping[str, Tensor],
        scalars: list[dict[str, dict[str, Any]]],
        param_groups: Sequence[Sequence[Mapping[str, Any]]],
        own_options: Iterable[str],
        extra_state: Mapping[str, Any],
    ) -> RankSummary:
        """The summary of a rank that holds these tensors."""
        shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        groups = [[dict(options) for options in of_one] for of_one in param_groups]
        return cls(coordinate, shapes, scalars, groups, frozenset(own_options), dict(extra_state))


@dataclass(frozen=True, slots=True)
class Agreement:
    """The summaries of all ranks, joined.

    Attributes:
        scalars: for each optimizer the whole model's state that isn't a tensor, by parameter.
        own_options: the options that differ between ranks and may: for each coordinate and optimizer, a dictionary for
            each group.
        copied: the parameters that several ranks hold.
        extra_state: what modules keep besides parameters and buffers. If several ranks have a module, it is the lowest
            rank's.
    """

    scalars: list[dict[str, dict[str, Any]]]
    param_groups: list[list[dict[str, Any]]]
    own_options: dict[str, list[list[dict[str, Any]]]]
    copied: list[str]
    extra_state: dict[str, Any]


def agree(ranks: Sequence[RankSummary], order: Sequence[str]) -> Agreement:
    """Join the summaries of all ranks, given in the order of ranks. Where several ranks hold one value, the lowest
    rank's is taken. ``order`` is that of the whole model's parameters; see :func:`merge_groups`.

    Raises:
        ValueError: two ranks share a coordinate, or disagree about a shape, the number of optimizers, or the parameter
            groups.
    """
    twice = [place for place, count in Counter(rank.coordinate for rank in ranks).items() if count > 1]
    if twice:
        raise ValueError(f"coordinate={twice[0]!r} is given by several ranks: each needs its own.")
    known: dict[str, Shape] = {}
    for rank in ranks:
        for key, shape in rank.shapes.items():
            if known.setdefault(key, shape) != shape:
                raise ValueError(
                    f"{key} is {known[key]} on one rank and {shape} on another: a checkpoint holds one tensor of each "
                    f"name."
                )
    own = frozenset[str]().union(*(rank.own_options for rank in ranks))
    counts = [len(rank.param_groups) for rank in ranks]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The ranks have {counts} optimizers: configure_optimizers has to make the same on every rank."
        )
    groups = [merge_groups(list(copies), order, own) for copies in zip(*(r.param_groups for r in ranks), strict=True)]
    own_options = {rank.coordinate: [_only(own, of_one) for of_one in rank.param_groups] for rank in ranks if own}
    names = {name for of_one in groups for group in of_one for name in group["params"]}
    holders = Counter(name for name in names for rank in ranks if f"model/{name}" in rank.shapes)
    scalars = [
        {name: values for copy in reversed(copies) for name, values in copy.items()}
        for copies in zip(*(rank.scalars for rank in ranks), strict=True)
    ]
    extra_state = {name: value for rank in reversed(ranks) for name, value in rank.extra_state.items()}
    copied = [name for name, count in holders.items() if count > 1]
    return Agreement(scalars, groups, own_options, copied, extra_state)


def _only(options: Set[str], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key in options} for group in groups]


def digests(model: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, bytes]:
    """A digest of each named tensor that this rank holds as a whole. Shards are left out: they are no copies of each
    other."""
    here = ((name, model[name]) for name in names if name in model)
    return {name: _digest(tensor) for name, tensor in here if not isinstance(tensor, (DTensor, Boxes))}


def _digest(tensor: Tensor) -> bytes:
    """A digest that differs between copies that have drifted apart. Sums of words, wrapping around, cost little on the
    tensor's device, a GPU too. Each sum is of a part of the tensor, so exchanged parts make a difference."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    length = len(raw) // (8 * _PARTS) * 8  # of a part, in bytes
    parts = raw[: _PARTS * length]
    if parts.storage_offset() % 8:  # a view into something else
        parts = parts.clone()
    sums, rest = parts.view(torch.int64).view(_PARTS, -1).sum(1), raw[_PARTS * length :]
    content = sums.cpu().numpy().tobytes() + rest.cpu().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def check_copies(ranks: Sequence[Mapping[str, bytes]]) -> None:
    """Refuse copies of a parameter that have drifted apart, since a checkpoint keeps one of them. ``ranks`` are the
    digests of each rank.

    Raises:
        RuntimeError: it names the parameters.
    """
    known: dict[str, bytes] = {}
    differing = [name for rank in ranks for name, digest in rank.items() if known.setdefault(name, digest) != digest]
    if differing:
        raise RuntimeError(f"Copies of one parameter differ between ranks, nothing is saved: {first_few(differing)}.")


def merge_groups(
    ranks: list[list[dict[str, Any]]], order: Sequence[str], own_options: Set[str] = frozenset()
) -> list[dict[str, Any]]:
    """An optimizer's parameter groups as one process with the whole model would have them.

    Args:
        ranks: for each rank its groups: options, and the names of the parameters under "params".
        order: all names in the order of the model. Names that it lacks come last, rank after rank.
        own_options: the options that may differ. The first rank's are taken.

    Raises:
        ValueError: the ranks have different numbers of groups, or different values of another option.
    """
    counts = [len(groups) for groups in ranks]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The optimizers of the ranks have {counts} parameter groups: configure_optimizers has to make the same "
            f"groups on every rank, empty where a rank holds none of a group's parameters."
        )
    position = {name: place for place, name in enumerate(order)}
    merged = []
    for index, copies in enumerate(zip(*ranks, strict=True)):
        options = {key: value for key, value in copies[0].items() if key != "params"}
        for copy in copies[1:]:
            other = {key: value for key, value in copy.items() if key != "params"}
            compared = (options.keys() | other.keys()) - own_options
            differing = [key for key in compared if not _equal(options, other, key)]
            if differing:
                key = min(differing)
                raise ValueError(
                    f"parameter group {index} has {key}={options.get(key)!r} on one rank and {other.get(key)!r} on "
                    f"another: a checkpoint holds one value of each option."
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
