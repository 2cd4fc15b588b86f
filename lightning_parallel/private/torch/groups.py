"""Private names of torch about process groups and collectives."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import Optimizer

# Collectives that gather into one tensor, or scatter one. They have these names since torch 2.13, which warns of the
# earlier ones.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def boxed_group(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an operator of torch.distributed was given, if ``argument`` is one. It is an object of
    TorchScript, whose type only a private method gives."""
    if isinstance(argument, torch.ScriptObject) and str(argument._type()).endswith(".ProcessGroup"):
        return dist.ProcessGroup.unbox(argument)
    return None


def group_by_name(name: str) -> dist.ProcessGroup:
    """The group of a name, as functional collectives (such as DTensor's) name theirs."""
    return c10d._resolve_process_group(name)  # type: ignore[attr-defined, no-any-return, arg-type]


@contextmanager
def connecting() -> Iterator[None]:
    """Inside, ranks make a group. With gloo each rank sends the others its address. If another machine can't reach one,
    gloo's error names the address, and no setting. The error here names the setting. gloo's has no type of its own, so
    it is known by its words."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        tried = re.search(r"remote=\[(.+?)\]", str(error))
        raise RuntimeError(
            f"gloo could not connect the ranks{f': nobody answered at {tried[1]}' if tried else ''}. Unless one of "
            f"them has stopped, which its own output says, they sent each other wrong addresses: gloo takes that "
            f"of a machine's name, which many systems set to 127.0.1.1. Set GLOO_SOCKET_IFNAME on all machines to the "
            f"network interface that joins them, as `ip -br address` lists it; in recipes, cluster.interface."
        ) from error


def group_of_members(
    ranks: Sequence[int], timeout: timedelta | None, backend: str | None = None, purpose: str = ""
) -> dist.ProcessGroup:
    """The group of some ranks for a purpose, this rank among them. Its members alone make it, and find it again as long
    as the default group lives. So many Trainers in a process have no more groups than one.

    The public ``new_group(use_local_synchronization=True)`` names a group by its ranks and by the number of groups that
    the calling rank is in. Members that are in different numbers of groups would wait for each other under different
    names. Here the name is made of the arguments, and of how many groups of just these there have been: under a name
    that was used before, by a group that was destroyed since, members would find addresses at which nobody listens. It
    is short, since it stands before every key in the store.

    Args:
        ranks: global ranks in ascending order.
        timeout: None for torch's default.
        backend: None for the default group's.
        purpose: what only this group is used for, if the same ranks need several.
    """
    default_backend, store = c10d._world.pg_map[c10d._get_default_group()]
    kind = dist.Backend(backend or default_backend)
    digest = hashlib.sha256(repr((tuple(ranks), timeout, kind, purpose)).encode()).hexdigest()
    for known, name in c10d._world.pg_names.items():
        if name.startswith(digest):
            return known
    # Each member counts for itself. The store lives as long as the default group, so all reach the same number.
    count = store.add(f"{digest}/of_rank_{dist.get_rank()}", 1)
    with connecting():
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            kind,
            store,
            f"{digest}/{count}",  # type: ignore[arg-type]  # a type of its own since torch 2.10
            timeout=timeout or c10d._get_default_timeout(kind),
        )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


def silent_group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group in which nothing is sent, known to this rank alone: each collective is over at once, and each rank gets
    its own values back. ``ranks`` are global ones in ascending order, this rank among them. It is made once."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (makes the backend known)

    return group_of_members(ranks, None, "fake")


class ThreadApart(threading.Thread):
    """A thread for which :func:`default_group` changes nothing: its default group stays that of all ranks."""


class _World(c10d._World):
    """torch's record of the process groups, with another default group for code that runs inside
    :func:`default_group`."""

    instead: dist.ProcessGroup | None = None

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        if self.instead is None or isinstance(threading.current_thread(), ThreadApart):
            return self._default_pg
        return self.instead

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default_pg = group


@contextmanager
def default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, ``group`` is the default group of torch.distributed: ``get_rank()`` and ``get_world_size()`` are this
    rank's there, and collectives run over it where the code gives no group. In the backward of such a collective, too,
    which on a GPU runs in a thread of torch's: so this holds for all threads but :class:`ThreadApart`. Where code gives
    another group, torch's ``get_rank(group)`` is wrong meanwhile; ``group.rank()`` is right."""
    world: Any = c10d._world
    world.__class__ = _World
    before, world.instead = world.instead, group
    try:
        yield
    finally:
        world.instead = before


def abort_groups() -> None:
    """Leave all groups in the middle of what they do. To destroy NCCL's would wait for messages that may never come
    (https://github.com/pytorch/pytorch/pull/141510)."""
    c10d._abort_process_group()


def default_store() -> Store:
    """The store over which the processes of the default group met. torch gives no other access to it where somebody
    else made the group."""
    return c10d._get_default_store()


class CommonScaler(ShardedGradScaler):
    """A loss scaler with which all ranks skip a step if the gradients of one overflow. torch's own shares this when it
    unscales gradients; a fused optimizer unscales them itself, after this private method has checked them."""

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        found = super()._check_inf_per_device(optimizer)
        for is_infinite in found.values():
            dist.all_reduce(is_infinite, dist.ReduceOp.MAX, self.process_group)
        return found


def forget_meshes() -> None:
    """Forget the device meshes that DTensor's caches of operators hold. They name process groups. If these have been
    destroyed, a DTensor of an equal mesh would still use them, or others of the same name."""
    _clear_sharding_prop_cache()
