"""How much a step computes, read off the graph that its forward has left for the backward.

Nothing runs, and nothing watches the step: a mode that sees every operation would get in the way of ``torch.compile``.
The graph has a node for each operation that a gradient passes, with the shapes of what goes in and out::

    loss <- NllLoss <- Addmm [32, 10]  <- Relu <- Addmm [32, 64]  <- the input
                       2 * 32 * 10 * 64           2 * 32 * 64 * 784

What needs no gradient isn't in the graph: the layers before the first one that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from types import MappingProxyType

from torch import Size, Tensor
from torch.autograd.graph import Node

from lightning_parallel.pipeline.operations import attention_flops
from lightning_parallel.torch_private import function_of, saved_tensor, saved_value, shape_of_operand, shape_of_result

# -- nodes -----------------------------------------------------------------------------------------------------------
# Each formula gives the operations of a node's forward as torch's counter of operations does; None if they can't be
# told.


def _product(node: Node, *inner: tuple[int, int]) -> int | None:
    """Of a product of matrices.

    Args:
        node: of the product.
        inner: operands, and their dims along which is summed.
    """
    for operand, dim in inner:
        shape = shape_of_operand(node, operand)
        if shape is not None:
            return 2 * prod(shape_of_result(node)) * shape[dim]
    return None


def _matmul(node: Node, left: str) -> int | None:
    return 2 * prod(shape_of_result(node)) * int(saved_value(node, f"{left}_sym_sizes")[1])


def _convolution(node: Node) -> int | None:
    places = _shape(node, 0, "input") if saved_value(node, "transposed") else shape_of_result(node)
    weight = _shape(node, 1, "weight")
    return None if places is None or weight is None else 2 * prod(places) * prod(weight[1:])


def _attention(node: Node) -> int | None:
    query, key, value = (_shape(node, i, name) for i, name in enumerate(("query", "key", "value")))
    if query is None or key is None or value is None:
        return None
    return attention_flops(query, key, value)


def _shape(node: Node, operand: int, name: str) -> Size | None:
    """Of an operand that the node has saved under a name."""
    known = shape_of_operand(node, operand)
    saved = saved_tensor(node, name) if known is None else None
    return known if saved is None else saved.shape


_FORMULAS: Mapping[str, Callable[[Node], int | None]] = MappingProxyType(
    {
        "AddmmBackward0": lambda node: _matmul(node, "mat1"),
        "MmBackward0": lambda node: _matmul(node, "self"),
        "BmmBackward0": lambda node: _product(node, (0, 2), (1, 1)),
        "BaddbmmBackward0": lambda node: _product(node, (1, 2), (2, 1)),
        "ConvolutionBackward0": _convolution,
        "_CopyLinearBackward": lambda node: _product(node, (0, -1), (1, -1)),  # tensor/copy_linear.py
        **dict.fromkeys(
            (
                "ScaledDotProductFlashAttentionBackward0",
                "ScaledDotProductFlashAttentionForCpuBackward0",
                "ScaledDotProductEfficientAttentionBackward0",
                "ScaledDotProductCudnnAttentionBackward0",
            ),
            _attention,
        ),
    }
)
# Functions written in Python say nothing of what they compute. These multiply no matrices.
_OTHERS = ("torch.distributed.", "lightning_parallel.tensor.")

# -- the graph -------------------------------------------------------------------------------------------------------


def operations_of(losses: Iterable[Tensor]) -> int | None:
    """The floating-point operations of the forwards that these losses come from, by torch's formulas.

    Args:
        losses: before their backward. What several of them come from counts once.

    Returns:
        None if they can't be told: a part of the graph was compiled, or is a function of the user's own.
    """
    total = 0
    nodes = [loss.grad_fn for loss in losses]
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        formula, function = _FORMULAS.get(node.name().rpartition("::")[2]), function_of(node)
        if formula is not None:
            operations = formula(node)
            if operations is None:
                return None
            total += operations
        elif function is not None and not function.__module__.startswith(_OTHERS):
            return None
        nodes += (following for following, _ in node.next_functions)
    return total
