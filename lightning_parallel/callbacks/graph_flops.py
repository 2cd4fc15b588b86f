"""Counts the operations of a step by the graph that its forward leaves for the backward.

Nothing runs, and nothing watches the step: a mode that sees every operator would get in the way of ``torch.compile``.
The graph has a node for each operator that a gradient passes, with the shapes of what goes in and out::

    loss <- NllLoss <- Addmm [32, 10]  <- Relu <- Addmm [32, 64]  <- the input
                       2 * 32 * 10 * 64           2 * 32 * 64 * 784

What needs no gradient isn't in the graph: the layers before the first one that is trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from math import prod
from types import MappingProxyType

from torch import Size, Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from lightning_parallel.private.torch import (
    function_of,
    is_nested,
    saved_tensor,
    saved_value,
    shape_of_operand,
    shape_of_result,
)
from lightning_parallel.tracing.operations import attention_flops

# -- nodes -----------------------------------------------------------------------------------------------------------
# Each formula gives the FLOPs of a node's forward, as torch.utils.flop_counter counts them; None if they can't be told.


def _product(node: Node, left: str) -> int:
    """The operations of a product of two matrices. Its node keeps the left one's sizes even if it needs no gradient."""
    return 2 * prod(shape_of_result(node)) * int(saved_value(node, f"{left}_sym_sizes")[1])


def _batched_product(node: Node, *summed: tuple[int, int]) -> int | None:
    """The operations of a batched product. Its node keeps no sizes, so they are read off an operand that needs a
    gradient. ``summed`` gives, for each of the two operands, its number and the dimension of it that the product sums
    over."""
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
    """The shape of an operand that the node has saved under a name."""
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
        "_CopyLinearBackward": lambda node: _batched_product(node, (0, -1), (1, -1)),  # tensor/shared_input.py
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
# Nodes that compute much, and have no formula: recurrent layers, products with vectors, sparse or nested tensors.
_UNKNOWN = re.compile(r"Rnn|Sparse|Attention|Convolution|Nested|CppNode|^(Linear|Matmul|Addmv|Addbmm|Mv|Trilinear)")
# Modules whose autograd Functions communicate and compute next to nothing; the one that multiplies matrices has a
# formula above. Of any other Function, nobody can tell.
_WITHOUT_FLOPS = ("torch.distributed.", "torch.nn.parallel.", "torch.nn.modules.", "lightning_parallel.tensor.")

# -- the graph -------------------------------------------------------------------------------------------------------


class ForwardFlops:
    """Counts the floating-point operations of the forwards that losses come from, on all ranks of a replica.

    Tensor ranks compute some layers in shards, and others each as a whole. In shards, the ranks' operations add up. So
    each node of the graph is one of two kinds::

        embed  ->  copy  ->  column  ->  attention  ->  row  ->  reduce  ->  head
        whole      --------------- in shards -----------------   whole ------------

    Args:
        tensor_ranks: the number of ranks of a replica that compute it together.

    Attributes:
        total: the operations so far. None once a part of a graph can't be counted: it was compiled, it is an
            ``autograd.Function`` of the user's own, or torch has no formula for an operator that computes much.
    """

    def __init__(self, tensor_ranks: int = 1) -> None:
        self.total: int | None = 0
        self._tensor_ranks = tensor_ranks
        self._in_shards: dict[Node, bool] = {}  # each is read once: a loss's backward frees what its nodes have saved

    def add(self, loss: Tensor) -> None:
        """Count the operations that this loss comes from and that no earlier loss came from. Call it before the loss's
        backward."""
        if loss.grad_fn is None or self.total is None:
            return
        for node in _operands_first(loss.grad_fn, self._in_shards):
            operands_are = any(self._in_shards[each] for each, _ in node.next_functions if each is not None)
            self._in_shards[node] = in_shards = _is_in_shards(node, operands_are)
            flops = _flops_of(node)
            if flops is None:
                self.total = None
                return
            self.total += flops * (self._tensor_ranks if in_shards else 1)


def _operands_first(root: Node, known: Container[Node]) -> Iterator[Node]:
    """The nodes that a node comes from, and itself, each after those that it comes from. Those in ``known`` are left
    out; add each node there when it has been yielded."""
    nodes = [root]
    while nodes:
        if nodes[-1] in known:
            nodes.pop()
            continue
        waiting = [each for each, _ in nodes[-1].next_functions if each is not None and each not in known]
        if waiting:
            nodes += waiting
        else:
            yield nodes.pop()


def _is_in_shards(node: Node, operands_are: bool) -> bool:
    """Do tensor ranks compute different parts of the node's result?"""
    function = function_of(node)
    if function is not None and function.__module__.startswith("lightning_parallel.tensor."):
        return getattr(node, "differs", False)  # tensor/functions.py
    return operands_are or hasattr(getattr(node, "variable", None), "shard")


def _flops_of(node: Node) -> int | None:
    name, function = node.name(), function_of(node)
    formula = _FLOPS_OF_NODE.get(name)
    if formula is not None:
        try:
            return None if is_nested(node) else formula(node)
        except Exception:  # any: a figure isn't worth a training
            return None
    if function is not None:
        return 0 if function.__module__.startswith(_WITHOUT_FLOPS) else None
    return None if _UNKNOWN.search(name) or isinstance(getattr(node, "variable", None), DTensor) else 0
