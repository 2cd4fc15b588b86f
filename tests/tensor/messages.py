"""What a piece of code sends, collective by collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


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
