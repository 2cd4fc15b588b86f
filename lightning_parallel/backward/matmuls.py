"""Operations whose weights' gradients can be computed later (``split.py``): the tensors needed, and formulas.

The formulas are those of torch's derivatives.yaml, so the results are the same bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_parallel.private.torch.autograd import saved_tensor, saved_value

# Computes a weight's gradient from the other operand of its matmul and from the gradient of the product.
Formula: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# The number of the other operand, the name under which the node has saved it, and the formula.
Found: TypeAlias = tuple[int, str, Formula]


def _addmm(node: Node, operand: int) -> Found | None:
    """``nn.Linear`` with a bias, and transformers' ``Conv1D``."""
    if operand == 0 or saved_value(node, "alpha") != 1:
        return None
    return _product(node, ("mat1", "mat2"), operand - 1, first=1)


def _mm(node: Node, operand: int) -> Found | None:
    """``nn.Linear`` without a bias."""
    return _product(node, ("self", "mat2"), operand, first=0)


def _product(node: Node, names: tuple[str, str], weight: int, first: int) -> Found | None:
    sizes, strides = saved_value(node, f"{names[weight]}_sym_sizes"), saved_value(node, f"{names[weight]}_sym_strides")
    if len(strides) != 2:  # a sparse matrix has none
        return None
    by_columns = strides[0] == 1 and strides[1] == sizes[0]  # then so is the gradient
    formulas: tuple[Formula, Formula] = (
        (lambda x, dy: x.conj().mm(dy.t()).t(), lambda x, dy: dy.t().mm(x.conj()).t())
        if by_columns
        else (lambda x, dy: dy.mm(x.t().conj()), lambda x, dy: x.t().conj().mm(dy))
    )
    return first + 1 - weight, names[1 - weight], formulas[weight]


def _bmm(node: Node, operand: int) -> Found | None:
    """A batched matmul, such as one for each expert."""
    if operand == 0:
        return 1, "mat2", lambda x, dy: dy.bmm(x.mT.conj())
    return 0, "self", lambda x, dy: x.mT.conj().bmm(dy)


def _convolution(node: Node, operand: int) -> Found | None:
    """A convolution without a bias: with one, most backends compute its gradient and the weight's together."""
    if operand != 1 or node.next_functions[2][0] is not None:
        return None
    weight = saved_tensor(node, "weight")
    if weight is None:
        return None
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    settings = [saved_value(node, name) for name in names]
    like = weight.detach()  # for its shape and memory format
    return (
        0,
        "input",
        lambda x, dy: torch.ops.aten.convolution_backward(dy, x, like, None, *settings, [False, True, False])[1],
    )


# By the name of a node's class: for the node and the number of the operand that is the weight, what is found; None if
# that operand isn't known to be one that can wait, such as a bias.
KNOWN: Mapping[str, Callable[[Node, int], Found | None]] = MappingProxyType(
    {
        "AddmmBackward0": _addmm,
        "MmBackward0": _mm,
        "BmmBackward0": _bmm,
        "ConvolutionBackward0": _convolution,
    }
)
