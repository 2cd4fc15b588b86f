"""What the tests of tensor layers share: groups, and messages counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def ranks(size: int) -> dist.ProcessGroup:
    """The first rank's group, which can't send: for what needs none."""
    return dist.ProcessGroup(0, size)


class Messages(TorchDispatchMode):
    """Inside ``with Messages() as messages``, every collective adds its name to ``messages.sent``.

    Collectives are operators, so all ways to call one are seen, and those of a backward too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.sent.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
