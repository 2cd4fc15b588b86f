"""What the tests of tensor layers share: groups, numbers that are the same on all ranks, and messages counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def ranks(size: int, rank: int = 0) -> dist.ProcessGroup:
    """A group that can't send: for what needs none."""
    return dist.ProcessGroup(rank, size)


def close(mine: Tensor | None, theirs: Tensor | None, what: str = "") -> None:
    assert (mine is None) == (theirs is None), what
    if mine is not None and theirs is not None:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


class Messages(TorchDispatchMode):
    """Inside ``with Messages() as messages``, every collective adds its name and how many numbers it was given.

    Collectives are operators, so all ways to call one are seen, and those of a backward too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.sent.append((func.overloadpacket.__name__, sum(x.numel() for x in tensors)))
        return func(*args, **(kwargs or {}))
