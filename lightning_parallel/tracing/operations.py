"""Counts operations on tensors: how much they compute, and what their backward needs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_parallel.private.torch.tensors import ATTENTION_ON_CPU, TorchDispatchMode, tree_leaves, written_arguments


class OperationsNoted(TorchDispatchMode):
    """Counts what the code that runs inside computes.

    Attributes:
        flops: the floating-point operations, by torch's formulas.
        nbytes: the bytes of the results, without views and in-place changes: about what a backward needs if nothing
            is computed again in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        shares = func.is_view or func.overloadpacket.__name__ == "_unsafe_view"
        if not shares and not any(True for _ in written_arguments(func, args, kwargs or {})):
            self.nbytes += nbytes_of(output)
        return output


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """The floating-point operations of the two products of matrices in scaled dot-product attention.

    Args:
        query: ``[..., queries, width]``. It may have several heads for each of the keys'.
        key: ``[..., keys, width]``.
        value: ``[..., keys, its width]``.
    """
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


# torch has formulas for attention on GPUs, and none for the CPU's. Its registry is read as it is at the time: users may
# add formulas of their own operators.
_FORMULAS: Mapping[Any, Callable[..., int]] = ChainMap(flop_registry, {ATTENTION_ON_CPU: _attention})


def nbytes_of(output: Any) -> int:
    """The memory that the tensors in an output take."""
    return sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
