"""How much a step computes, read off the graph that its forward leaves for the backward.

Nothing runs, and nothing watches the step: a mode that sees every operator would get in the way of ``torch.compile``.
The graph has a node for each operator that a gradient passes, with the shapes of what goes in and out::

    loss <- NllLoss <- Addmm [32, 10]  <- Relu <- Addmm [32, 64]  <- the input
                       2 * 32 * 10 * 64           2 * 32 * 64 * 784

What needs no gradient isn't in the graph: the layers before the first one that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

from torch import Size, Tensor
from torch.autograd.graph import Node

from lightning_parallel.pipeline.operations import attention_flops
from lightning_parallel.torch_private import function_of, saved_tensor, saved_value, shape_of_operand, shape_of_result

# -- nodes -----------------------------------------------------------------------------------------------------------
# Each formula gives the FLOPs of a node's forward, as torch.utils.flop_counter counts them; None if they can't be told.


def _product(node: Node, left: str) -> int:
    """Of a product of two matrices, whose node keeps the left one's sizes even if it needs no gradient."""
    return 2 * prod(shape_of_result(node)) * int(saved_value(node, f"{left}_sym_sizes")[1])


def _batched_product(node: Node, *summed: tuple[int, int]) -> int | None:
    """Of a batched product, whose node keeps no sizes: they are read off an operand that needs a gradient.

    Args:
        node: of the product.
        summed: for each of the two operands, its number, and the dim of it that the product sums over.
    """
    for operand, dim in summed:
        shape = shape_of_operand(node, operand)
        if shape is not None:
            return 2 * prod(shape_of_result(node)) * shape[dim]
    return None


def _convolution(node: Node) -> int | None:
    places = _shape(node, 0, "input") if saved_value(node, "transposed") else shape_of_result(node)
    weight = _shape(node, 1, "weight")
    return None if places is None or weight is None else 2 * prod(places) * prod(weight[1:])


def _attention(node: Node) -> int | None:
    query, key, value = (_shape(node, i, name) for i, name in enumerate(("query", "key", "value")))
    return None if query is None or key is None or value is None else attention_flops(query, key, value)


def _shape(node: Node, operand: int, name: str) -> Size | None:
    """Of an operand that the node has saved under a name."""
    known = shape_of_operand(node, operand)
    saved = saved_tensor(node, name) if known is None else None
    return known if saved is None else saved.shape


_FLOPS_OF_NODE: Mapping[str, Callable[[Node], int | None]] = MappingProxyType(
    {
        "AddmmBackward0": lambda node: _product(node, "mat1"),
        "MmBackward0": lambda node: _product(node, "self"),
        "BmmBackward0": lambda node: _batched_product(node, (0, 2), (1, 1)),
        "BaddbmmBackward0": lambda node: _batched_product(node, (1, 2), (2, 1)),
        "ConvolutionBackward0": _convolution,
        "_CopyLinearBackward": lambda node: _batched_product(node, (0, -1), (1, -1)),  # tensor/copy_linear.py
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
# Modules whose autograd Functions communicate and compute next to nothing; the one that multiplies matrices has a
# formula above. Of any other Function, nobody can tell.
_WITHOUT_FLOPS = ("torch.distributed.", "lightning_parallel.tensor.")

# -- the graph -------------------------------------------------------------------------------------------------------


class ForwardFlops:
    """Counts the floating-point operations of the forwards that losses come from. Operators of torch for which there is
    no formula above count as 0, as those of torch's own counter do.

    Attributes:
        total: so far. None once a part of a graph can't be told: it was compiled, or it is an ``autograd.Function`` of
            the user's own.
    """

    def __init__(self) -> None:
        self.total: int | None = 0
        self._seen: set[Node] = set()  # each is read once: the backward of its loss frees what it has saved

    def add(self, loss: Tensor) -> None:
        """Count what this loss comes from and no earlier one did.

        Args:
            loss: before its backward.
        """
        nodes = [loss.grad_fn]
        while nodes and self.total is not None:
            node = nodes.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            flops = _flops_of(node)
            self.total = None if flops is None else self.total + flops
            nodes += (following for following, _ in node.next_functions)


def _flops_of(node: Node) -> int | None:
    formula = _FLOPS_OF_NODE.get(node.name())
    if formula is not None:
        return formula(node)
    function = function_of(node)
    return 0 if function is None or function.__module__.startswith(_WITHOUT_FLOPS) else None
