"""Collectives outside the model: exchange objects, copy tensors from one rank, and raise an error on all ranks.

A collective that breaks, because a rank died or stopped, raises :class:`PeerLostError` on the others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: the world, or this process alone if nothing is initialised
T = TypeVar("T")

MESSAGE = 2**25  # bytes of small tensors that are copied together
_BROKEN = re.compile(r"gloo/transport|connect|closed|reset by|broken pipe|time ?out|timed out", re.IGNORECASE)


class PeerLostError(RuntimeError):
    """A rank that this one has to communicate with has stopped. The cause is in that rank's output."""


def guarded(collective: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call one function of ``torch.distributed``; if its connection breaks, raise that a rank was lost.

    torch raises a ``DistError``, or a plain RuntimeError with gloo's words, for a broken connection. An error of this
    rank's own, such as a dtype that the backend doesn't know, passes as it is.
    """
    try:
        return collective(*args, **kwargs)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _BROKEN.search(str(error)):
            raise
        raise PeerLostError(
            "A collective of several ranks broke: one of them stopped, or did not answer within the timeout. The cause "
            "is in its own output."
        ) from error


def _is_alone(group: Group) -> bool:
    """Is this rank the only one of the group? Then nothing is sent: for a first message NCCL would connect a group of
    one rank too, and take 0.4 GB and more for it (https://github.com/NVIDIA/nccl/issues/2363)."""
    return not dist.is_initialized() or dist.get_world_size(group) == 1


def broadcast_tensors(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Overwrite tensors of any dtype and layout with the values of global rank ``source``. All ranks of the group pass
    the same tensors. Small ones share a message: a model has hundreds of buffers of a few bytes. Parameters are written
    without autograd's knowledge."""
    if _is_alone(group):
        return
    for bucket in buckets(tensors, lambda tensor: tensor.nbytes, lambda tensor: tensor.device):
        raw = [tensor.data.contiguous().reshape(-1).view(torch.uint8) for tensor in bucket]  # for any backend
        message = torch.cat(raw) if len(raw) > 1 else raw[0]
        guarded(dist.broadcast, message, source, group)
        for tensor, piece in zip(bucket, message.split([each.numel() for each in raw]), strict=True):
            aligned = piece.clone() if len(raw) > 1 else piece  # for a view of another dtype
            values = aligned.view(tensor.dtype).view_as(tensor)
            tensor = tensor.data
            for dim, size in enumerate(tensor.shape):
                if size > 1 and tensor.stride(dim) == 0:  # expanded: all entries are in one place
                    tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            tensor.copy_(values)


def buckets(
    items: Iterable[T], nbytes: Callable[[T], int], kind: Callable[[T], object], limit: int = MESSAGE
) -> Iterator[list[T]]:
    """The items in their order, in lists that travel in one message: each list is of one kind, and of at most ``limit``
    bytes where it has several items."""
    bucket: list[T] = []
    size = 0
    for item in items:
        if bucket and (size + nbytes(item) > limit or kind(item) != kind(bucket[0])):
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket


def broadcast_object(value: T | None, source: int | None, group: Group) -> T:
    """The object that a rank passes, on all ranks of the group. What other ranks pass is ignored.

    Args:
        source: a global rank; None for the first rank of the group.
        group: None for all ranks.
    """
    boxed: list[Any] = [value]
    if _is_alone(group):
        return boxed[0]
    guarded(dist.broadcast_object_list, boxed, source, group, group_src=0 if source is None else None)
    return boxed[0]


def reduce_tensor(tensor: Tensor, group: dist.ProcessGroup, operation: Any) -> Tensor:
    """Reduce a tensor over a group, in place.

    Args:
        operation: a ``dist.ReduceOp``, or a name as ``self.log(reduce_fx=...)`` takes it: "mean", "avg", "sum", "min",
            "max", "product".
    """
    if _is_alone(group):
        return tensor
    name = operation.lower() if isinstance(operation, str) else None
    if name not in ("mean", "avg"):
        op = operation if name is None else getattr(dist.ReduceOp, name.upper())
        guarded(dist.all_reduce, tensor, op, group=group)
        return tensor
    guarded(dist.all_reduce, tensor, dist.ReduceOp.SUM, group=group)  # gloo has no average
    mean = tensor / group.size()
    return tensor.copy_(mean)  # an integer's mean is cut off, as Lightning's is


def gather_objects(value: T, group: Group) -> list[T]:
    """The objects of all ranks, in the order of ranks, on all ranks."""
    if _is_alone(group):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    guarded(dist.all_gather_object, values, value, group=group)
    return values


def gather_objects_on_first(value: T, group: Group) -> list[T] | None:
    """The objects of all ranks, in the order of ranks, on the group's first rank; None on the others."""
    if _is_alone(group):
        return [value]
    first = dist.get_rank(group) == 0
    values: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    guarded(dist.gather_object, value, values, group=group, group_dst=0)
    return values


def decided_by_first(group: Group, decide: Callable[[], T]) -> T:
    """Run ``decide`` on the group's first rank, and return its result on all ranks. Its error is raised on all.

    Raises:
        ValueError: on the other ranks, if the first one raised a ValueError.
        RuntimeError: on the other ranks, if it raised something else.
    """
    if _is_alone(group):
        return decide()
    own = decide if dist.get_rank(group) == 0 else lambda: None
    return broadcast_object(together(group, own), None, group)


def together(group: Group, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank. If it fails on one, raise on all, so that none waits for a rank that has left.

    Where ``action`` has collectives of its own, they are :func:`guarded`. A rank whose connection broke doesn't report
    it, since others may still wait inside of ``action``. They end when this rank leaves.

    Raises:
        PeerLostError: a rank has stopped.
        ValueError: on the other ranks, if the one that failed raised a ValueError.
        RuntimeError: on the other ranks, if it raised something else.
    """
    if _is_alone(group):
        return action()
    error: Exception | None = None
    try:
        result = action()
    except PeerLostError:
        raise
    except Exception as caught:  # any: it is raised below, when the other ranks know
        error = caught
    if highest(group, int(error is not None)) == [0]:
        return result
    reports = gather_objects(None if error is None else _report(error), group)
    if error is not None:
        raise error
    kind, message = next(report for report in reports if report is not None)
    raise kind(message)


def _report(error: Exception) -> tuple[type[Exception], str]:
    """What the other ranks raise for an error of this rank, which they name by its global rank. Errors of the usual
    kinds speak for themselves; of others the kind is named too."""
    words = str(error) if type(error) in (ValueError, RuntimeError) else f"{type(error).__name__}: {error}"
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind, f"rank {dist.get_rank()}: {words}"


def highest(group: Group, *numbers: int) -> list[int]:
    """The highest that any rank passes, of each number. Each rank sends these alone; objects exchanged between all
    ranks would grow with the square of their number."""
    if _is_alone(group):
        return [*numbers]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    found = torch.tensor(numbers, device=device)
    guarded(dist.all_reduce, found, dist.ReduceOp.MAX, group=group)
    return found.tolist()


def all_alike(group: Group, value: object) -> bool:
    """Do all ranks pass a value with the same ``repr``? Each sends a hash of it, and the hash's negative."""
    number = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")
    largest, negative = highest(group, number, -number)
    return largest == -negative
