"""Reads by which numbers a loss is divided, from its autograd graph.

A loss is a sum of *terms*, each a sum over something, divided by its number. The graph of autograd has both: the
operations between the sum and the loss are its first nodes, and each has saved by what it divides::

    (l * mask).sum() / mask.sum() + 0.1 * z.mean()

    Add <- Div [saved: 13] <- Sum <- Mul <- ...        a term that averages over 13
        <- Mul [saved: 0.1] <- Mean [saved: 8] <- ...  a term that averages over 8, 80 with its factor

So it doesn't matter how the user has come to the 13: by ``len``, through NumPy, or under a branch on values. Nothing
watches the step, and no host waits for a GPU: numbers stay on their device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isinf, prod

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_parallel.losses import operations as ops
from lightning_parallel.private.torch.autograd import saved_tensor, saved_value, shape_of_operand, shape_of_result

Number = float | Tensor  # a tensor without dimensions where it isn't in the host's memory

_MOST = 2_000  # nodes; a loss of more parts is read no further


@dataclass(frozen=True)
class Term:
    """A part of a loss, which is added to the others.

    Attributes:
        edge: where the graph of the term begins, below its divisions: 0 / 0 in them spoils no gradient.
        above: by what the loss divides the term, up to ``edge``.
        below: by what the graph below ``edge`` divides.
        nodes: the operations that divide the term, the outermost first; without any it may be a sum.
        is_summed: has its sum been read? Below, tensors of one element may hold something for each sample of one.
    """

    edge: GradientEdge
    above: Number = 1.0
    below: Number = 1.0
    nodes: tuple[Node, ...] = ()
    is_summed: bool = False

    @property
    def key(self) -> str:
        """By which the term is known in other microbatches."""
        return " ".join(node.name() for node in self.nodes)

    @property
    def count(self) -> Number:
        """What the term averages over, in all."""
        return self.above * self.below

    @cached_property
    def is_of_weights(self) -> bool:
        """Is the term computed from parameters alone, as weight decay is? Its number is no number of samples."""
        return _is_learned(self.edge.node)

    @property
    def is_times_zero(self) -> bool:
        """Is the term multiplied by 0? It counts for no number, but its parameters have gradients of zero."""
        return isinstance(self.above, float) and isinf(self.above)

    @property
    def is_guarded(self) -> bool:
        """May the number that divides the term be a stand-in for 0, as of ``clamp(min=1)``?"""
        return not self.nodes or any(node.name() in ops.DIVISIONS for node in self.nodes)


def terms_of(loss: Tensor) -> list[Term]:
    """The terms of a loss that aren't multiplied by 0. Takes what :func:`all_terms_of` does."""
    return [term for term in all_terms_of(loss) if not term.is_times_zero]


def all_terms_of(loss: Tensor) -> list[Term]:
    """The terms of a loss; none of one without a graph.

    Args:
        loss: a scalar, before its backward.
    """
    if not loss.requires_grad:
        return []
    edge = get_gradient_edge(loss)
    found: list[Term] = []
    waiting: list[_Step] = [(Term(edge), edge)]
    for _ in range(_MOST):
        if not waiting:
            break
        term, reached = waiting.pop()
        following = [*_read(term, reached)]
        waiting += reversed(following)
        if not following:
            found.append(term)
    return found + [term for term, _ in waiting]


# A term, and how far it has been read. That is its edge as long as a backward may begin there.
_Step = tuple[Term, GradientEdge]


def _read(term: Term, reached: GradientEdge) -> Iterator[_Step]:
    """Read one node: what the term is below it, or the terms; nothing if the sum is reached."""
    node = reached.node
    name = node.name()
    if name in ops.LINEAR:
        yield _moved(term, reached, _operand(node), -1.0 if name in ops.NEGATIONS else 1.0)
    elif name in ops.ADDITIONS and reached is term.edge:
        for edge, factor in zip(_operands(node).values(), _factors(node), strict=True):
            yield _moved(term, reached, edge, inverse(factor))
    elif name in ops.MEANS:
        count = ops.MEANS[name](node)
        if count is not None:
            number = number_of(count) if isinstance(count, Tensor) else count
            yield _reduction(replace(term, nodes=(*term.nodes, node)), reached, number)
    elif name in ops.SUMS:
        yield _reduction(term, reached, 1.0)
    elif name in ops.DIVISIONS or name in ops.PRODUCTS:
        yield from _scaled(term, reached)


def _operands(node: Node) -> dict[int, GradientEdge]:
    """The operands that need a gradient, by their index."""
    edges = enumerate(node.next_functions)
    return {i: GradientEdge(each, number) for i, (each, number) in edges if each is not None}


def _operand(node: Node) -> GradientEdge:
    return next(iter(_operands(node).values()))


def _moved(term: Term, reached: GradientEdge, edge: GradientEdge, divisor: Number, *, stays: bool = False) -> _Step:
    """A term that has been read on to an edge.

    Args:
        divisor: of what is below.
        stays: the term's own edge stays where it is.
    """
    if stays or reached is not term.edge:
        return replace(term, below=term.below * divisor), edge
    return replace(term, above=term.above * divisor, edge=edge), edge


def inverse(number: Number) -> Number:
    """1 / number, infinite for 0: a loss that is divided by 0 has no other gradient in one process."""
    return 1 / number if isinstance(number, Tensor) or number else inf


def _factors(node: Node) -> list[float]:
    """By what an addition multiplies the operands that need a gradient."""
    operands = _operands(node)
    if node.name() not in ops.SIGNS or len(node.next_functions) != 2:
        return [1.0] * len(operands)
    signs = ops.SIGNS[node.name()](float(saved_value(node, "alpha")))
    return [signs[i] for i in operands]


def _reduction(term: Term, reached: GradientEdge, count: Number) -> _Step:
    """A sum or a mean. Of what has been joined for it, each begins by itself; what has been divided, below that."""
    edge, term = _operand(reached.node), replace(term, is_summed=True)
    goes_on = edge.node.name() in ("StackBackward0", "CatBackward0", *ops.DIVISIONS)
    return _moved(term, reached, edge, count, stays=not goes_on)


def _scaled(term: Term, reached: GradientEdge) -> Iterator[_Step]:
    """A division by a number, or a product with one."""
    node = reached.node
    divides = node.name() in ops.DIVISIONS
    operands = _operands(node)
    summed = [i for i, edge in operands.items() if not _is_learned(edge.node)]
    if len(summed) != 1 or (divides and summed != [0]):
        return  # of two sums: no mean
    number = _number_beside(node, 1 - summed[0], of_samples=term.is_summed)
    if number is None:
        return
    if divides:
        term = replace(term, nodes=(*term.nodes, node))
    # What is learned gets its own gradient from this node.
    is_learned = len(operands) > len(summed)
    yield _moved(term, reached, operands[summed[0]], number if divides else inverse(number), stays=is_learned)


def _number_beside(node: Node, operand: int, *, of_samples: bool = False) -> Number | None:
    """The operand of a product or a division that is no sum; None if it is more than one number.

    Args:
        of_samples: it may have an element for each sample. Then only a tensor without dimensions is one number.
    """
    saved: Tensor | float | None
    if node.name() in ("MulBackward1", "DivBackward1"):
        saved = saved_value(node, "other")
    else:
        saved = saved_tensor(node, "other" if operand else "self")
    if isinstance(saved, Tensor):
        return number_of(saved) if saved.numel() == 1 and not (of_samples and saved.dim()) else None
    return None if saved is None else float(saved)


def _is_learned(node: Node) -> bool:
    """Does a node give what is computed from parameters alone, such as a temperature, or the squares of weights?"""
    waiting, scaled = [node], list[Node]()
    for _ in range(20):
        if not waiting:
            return all(_number_beside(each, 1 - next(iter(_operands(each)))) is not None for each in scaled)
        each = waiting.pop()
        operands, shape = _operands(each), shape_of_result(each)
        if hasattr(each, "variable"):
            if prod(shape) != 1 and not isinstance(each.variable, nn.Parameter):
                return False
        elif not operands:
            return False
        elif max(prod(shape), *(prod(shape_of_operand(each, i) or ()) for i in operands)) != 1:
            # Not just numbers. What looks samples up in weights, or joins them with weights, gives another shape.
            if each.name() in ops.PRODUCTS | ops.DIVISIONS and len(operands) == 1:
                scaled.append(each)
            elif len(operands) < len(each.next_functions):
                return False
            if each.name() not in ops.REDUCTIONS and shape not in [shape_of_operand(each, i) for i in operands]:
                return False
        waiting += [edge.node for edge in operands.values()]
    return False


def has_kink(term: Term) -> bool:
    """Is a term a mean that has been bent at a value: ``relu(mean - 1)``, ``mean.clamp(min=0.5)``, ``mean.abs()``? As
    long as all microbatches are on one side of it, nothing else tells that it is no mean."""
    node = term.edge.node
    operands = _operands(node)
    shapes = [shape_of_result(node), *(shape_of_operand(node, i) or () for i in operands)]
    is_learned = all(_is_learned(edge.node) for edge in operands.values())
    return node.name() in ops.KINKED and all(prod(shape) == 1 for shape in shapes) and not is_learned


def anything_counts(term: Term) -> bool | Tensor | None:
    """Does any element count in a term's sum? None if its graph doesn't tell."""
    node = term.edge.node
    for _ in range(8):
        name = node.name()
        if name in ("IndexBackward0", "MaskedSelectBackward0"):
            return prod(shape_of_result(node)) > 0
        for mask in _masks(node):
            if mask is not None and mask.dim():
                found, is_here = (mask != 0).any(), mask.device.type == "cpu"
                if mask.numel() > 1 or (is_here and not found):  # that of one sample may be a factor
                    return bool(found) if is_here else found
        if name not in ops.LINEAR | ops.SUMS | ops.PRODUCTS | ops.DIVISIONS or not _operands(node):
            return None
        node = _operand(node).node
    return None


def _masks(node: Node) -> list[Tensor | None]:
    """What is 0 where an operand of a node doesn't count. A product has one that needs no gradient."""
    name = node.name()
    if name == "MaskedFillBackward0":
        filled = saved_tensor(node, "mask")
        return [None if filled is None else ~filled]
    if name == "WhereBackward0":
        return [saved_tensor(node, "condition")]
    names = {"MulBackward0": ("self", "other"), "DotBackward0": ("self", "tensor")}.get(name, ())
    return [saved_tensor(node, names[1 - i]) for i in _operands(node)] if len(names) > len(_operands(node)) else []


def number_of(value: Tensor) -> Number:
    """A tensor of one element as a number, if the host has it; on a GPU it stays there."""
    value = value.detach()
    return float(value) if value.device.type == "cpu" else value.double().reshape(())


def scalar(number: Number, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """A number as a tensor without dimensions. A Python number is written there by the device: torch.as_tensor copies
    it from the host's memory, for which the host waits until the device has run all that was launched before."""
    if isinstance(number, Tensor):
        return number.to(device, dtype).reshape(())
    return torch.full((), number, dtype=dtype, device=device)
