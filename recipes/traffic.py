"""What a rank sends in a step, by kind of message: counted where it is sent or arrives.

Bytes are those on the wire, for each rank, as a ring sends them (Patarasso & Yuan 2009); n ranks, b bytes of the whole
tensor:

    all-reduce                    2 (n - 1) / n x b
    all-gather, reduce-scatter      (n - 1) / n x b
    broadcast                       (n - 1) / n x b     the mean over ranks: n - 1 of them get the b bytes
    point-to-point                              b

A message of one number carries no part of the model or its activations; it is a metric, a norm or a signal, of kind
"scalars".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.private.torch.groups import boxed_group, group_by_name
from lightning_parallel.private.torch.tensors import TorchDispatchMode, tensors_in

POINT_TO_POINT, SCALARS = "point-to-point", "scalars"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", POINT_TO_POINT, SCALARS)

# How the names of torch.distributed's operators, and of its functional collectives, begin without underscores.
_BEGINNINGS = (*((kind.replace("-", ""), kind) for kind in KINDS[:4]), ("recv", POINT_TO_POINT))
# No messages of their own: a pipeline's sends are counted where they arrive.
_LEFT_OUT = frozenset({"send", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"})


def wire_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends, for ``nbytes`` of the whole tensor."""
    if kind == POINT_TO_POINT:
        return nbytes
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * nbytes


class Traffic(TorchDispatchMode):
    """Inside ``with Traffic() as traffic``, counts what this thread sends and what it gets.

    Collectives are operators, so all ways to call one are seen: DDP's C++ calls in a backward, ``fully_shard``'s, this
    package's. A pipeline sends from a thread of its own, where no dispatch mode looks; but it posts each receive from
    the stage's thread, and what a rank sent is what its neighbours got from it.

    Attributes:
        sent: bytes on the wire by kind, but for point-to-point.
        messages: how many, by kind.
        received: point-to-point bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.received = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and what it calls is seen
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in _LEFT_OUT:
            plain = name.replace("_", "")
            kind = next((kind for beginning, kind in _BEGINNINGS if plain.startswith(beginning)), name)
            self._count(kind, result, args)
        return result

    def _count(self, kind: str, result: Any, args: tuple[Any, ...]) -> None:
        # The whole tensor is the larger of what goes in and what comes out; pieces are given as a list of them.
        whole = max((tensors_in(value) for value in (result, *args)), key=_nbytes)
        if kind == POINT_TO_POINT:
            self.received += _nbytes(whole)
        else:
            group = _group(args)
            kind = SCALARS if sum(tensor.numel() for tensor in whole) <= group.size() else kind
            self.sent[kind] += round(wire_bytes(kind, _nbytes(whole), group.size()))
        self.messages[kind] += 1


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The operator's: an object of TorchScript's, or for the functional collectives its name."""
    found = next((group for group in map(boxed_group, reversed(args)) if group is not None), None)
    return group_by_name(args[-1]) if found is None else found
