"""What runs on tensors: which operations, and how much they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_parallel.torch_private import TorchDispatchMode, tree_leaves


class OperationsNoted(TorchDispatchMode):
    """Notes the operations of what runs inside.

    Attributes:
        flops: their floating-point operations, by torch's formulas.
        names: of the operations, with what each is given: shape, dtype and requires_grad of tensors; only with
            ``named``.
    """

    def __init__(self, *, named: bool = False) -> None:
        super().__init__()
        self.flops = 0
        self.names: list[tuple[str, tuple[tuple[torch.Size, torch.dtype, bool], ...]]] = []
        self._named = named

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        if self._named:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.names.append((str(func), tuple((x.shape, x.dtype, x.requires_grad) for x in given)))
        return output
