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
from math import inf, isinf, prod
from types import MappingProxyType

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_parallel.torch_private import saved_tensor, saved_value, shape_of_operand, shape_of_result

Number = float | Tensor  # a tensor without dimensions where it isn't in the host's memory

_MOST = 2_000  # nodes; a loss of more parts is read no further


@dataclass(frozen=True)
class Term:
    """A part of a loss, which is added to the others.

    Attributes:
        key: the names of the operations between the sum and the loss, by which it is known in other microbatches.
        edge: where the graph of the term begins, below its divisions: 0 / 0 in them spoils no gradient.
        above: by what the loss divides the term, up to ``edge``.
        below: by what the graph below ``edge`` divides.
        averages: is it divided at all? Otherwise it may be a sum.
        guarded: does it come from a division, whose number may be a stand-in for 0, as of ``clamp(min=1)``?
        node: that divides it.
    """

    key: str
    edge: GradientEdge
    above: Number = 1.0
    below: Number = 1.0
    averages: bool = False
    guarded: bool = False
    node: Node | None = None

    @property
    def count(self) -> Number:
        """What the term averages over, in all."""
        return self.above * self.below


def terms_of(loss: Tensor) -> list[Term]:
    """The terms of a loss; none of one without a graph.

    Args:
        loss: a scalar, before its backward.
    """
    if not loss.requires_grad:
        return []
    edge = get_gradient_edge(loss)
    found: list[Term] = []
    waiting = [(Term("", edge), edge, True)]
    for _ in range(_MOST):
        if not waiting:
            break
        term, (node, *_), moves = waiting.pop()
        following = [*_read(term, node, moves)]
        waiting += reversed(following)
        if not following:
            found.append(term)
    found += [term for term, _, _ in waiting]
    return [term for term in found if not (isinstance(term.above, float) and isinf(term.above))]  # times 0


_Step = tuple[Term, GradientEdge, bool]  # a term, how far it has been read, and does its edge move on with that?


def _read(term: Term, node: Node, moves: bool) -> Iterator[_Step]:
    """Read one node: what the term is below it, or the terms; nothing if the sum is reached."""
    name = node.name()
    if name in _LINEAR:
        edge = _operands(node)[0]
        yield _divided(term, -1.0 if name in _NEGATIONS else 1.0, moves, edge), edge, moves
    elif name in _ADDITIONS:
        yield from _branches(term, node) if moves else ()
    elif name in _MEANS:
        count = _MEANS[name](node)
        if count is not None:
            yield from _reduction(replace(_named(term, node), averages=True, node=node), node, count, moves)
    elif name in _SUMS:
        yield from _reduction(term, node, 1.0, moves)
    elif name in _DIVISIONS:
        yield from _scaled(term, node, moves, divides=True)
    elif name in _PRODUCTS:
        yield from _scaled(term, node, moves, divides=False)


def _named(term: Term, node: Node) -> Term:
    return replace(term, key=f"{term.key} {node.name()}")


def _operands(node: Node) -> list[GradientEdge]:
    return [GradientEdge(each, number) for each, number in node.next_functions if each is not None]


def _branches(term: Term, node: Node) -> Iterator[_Step]:
    """The terms of a sum. Each has a beginning of its own."""
    operands = _operands(node)
    factors = [1.0] * len(operands)
    if node.name() in _SIGNS and len(node.next_functions) == 2:
        signs = _SIGNS[node.name()](float(saved_value(node, "alpha")))
        factors = [sign for sign, (each, _) in zip(signs, node.next_functions, strict=True) if each is not None]
    for edge, factor in zip(operands, factors, strict=True):
        yield _divided(term, 1 / factor if factor else inf, True, edge), edge, True


def _divided(term: Term, number: Number, moves: bool, edge: GradientEdge) -> Term:
    if moves:
        return replace(term, above=term.above * number, edge=edge)
    return replace(term, below=term.below * number)


def _reduction(term: Term, node: Node, count: Number, moves: bool) -> Iterator[_Step]:
    """A sum or a mean. Of what has been joined for it, each begins by itself; what has been divided, below that."""
    edge = _operands(node)[0]
    if moves and edge.node.name() in ("StackBackward0", "CatBackward0", *_DIVISIONS):
        yield _divided(term, count, True, edge), edge, True
    else:
        yield replace(term, below=term.below * count), edge, False


def _scaled(term: Term, node: Node, moves: bool, *, divides: bool) -> Iterator[_Step]:
    """A division by a number, or a product with one."""
    operands = [i for i, (each, _) in enumerate(node.next_functions) if each is not None]
    learned = [i for i in operands if _is_learned(node, i)]
    summed = [i for i in operands if i not in learned]
    if len(summed) != 1 or (divides and summed != [0]):
        return  # of two sums: no mean
    number = _factor(node, 1 - summed[0])
    if number is None:
        return
    edge = _operands(node)[operands.index(summed[0])]
    moves = moves and not learned  # what is learned gets its own gradient from this node
    if divides:
        term = replace(_named(term, node), averages=True, guarded=True, node=node)
    else:
        number = inf if isinstance(number, float) and not number else 1 / number
    yield _divided(term, number, moves, edge), edge, moves


def _factor(node: Node, operand: int) -> Number | None:
    """The number that is no sum, of a product or a division; None if it is more than one number."""
    saved: Tensor | float | None
    if node.name() in ("MulBackward1", "DivBackward1"):
        saved = saved_value(node, "other")
    else:
        saved = saved_tensor(node, "other" if operand else "self")
    if isinstance(saved, Tensor):
        return number_of(saved) if saved.numel() == 1 else None
    return None if saved is None else float(saved)


def _is_learned(node: Node, operand: int) -> bool:
    """Is an operand a number that is computed from parameters of one element, such as a temperature?"""
    waiting = [node.next_functions[operand][0]]
    for _ in range(20):
        if not waiting:
            return True
        each = waiting.pop()
        if each is None:
            continue
        variable = getattr(each, "variable", None)
        size = variable.numel() if isinstance(variable, Tensor) else prod(shape_of_result(each))
        if size != 1 or (variable is None and not each.next_functions):
            return False
        waiting += [following for following, _ in each.next_functions]
    return False


def has_kink(term: Term) -> bool:
    """Is a term a mean that has been bent at a value: ``relu(mean - 1)``, ``mean.clamp(min=0.5)``, ``mean.abs()``? As
    long as all microbatches are on one side of it, nothing else tells that it is no mean."""
    node = term.edge.node
    operands = [i for i, (each, _) in enumerate(node.next_functions) if each is not None]
    return (
        node.name() in _KINKED
        and prod(shape_of_result(node)) == 1
        and all(prod(shape_of_operand(node, i) or ()) == 1 for i in operands)
        and not all(_is_learned(node, i) for i in operands)
    )


def anything_counts(term: Term) -> bool | Tensor | None:
    """Does any element count in a term's sum? None if its graph doesn't tell."""
    node: Node | None = term.edge.node
    for _ in range(8):
        if node is None:
            return None
        name = node.name()
        if name in ("IndexBackward0", "MaskedSelectBackward0"):
            return prod(shape_of_result(node)) > 0
        masks = [saved_tensor(node, _MASKS[name][0])] if name in _MASKS else _constants(node, name)
        for mask in masks:
            if mask is not None and mask.numel() > 1:
                found = (~mask if name == "MaskedFillBackward0" else mask != 0).any()
                return bool(found) if found.device.type == "cpu" else found
        node = next((each for each, _ in node.next_functions if each is not None), None)
        if name not in _LINEAR | _SUMS and name not in _PRODUCTS | _DIVISIONS:
            return None
    return None


_MASKS = MappingProxyType({"MaskedFillBackward0": ("mask",), "WhereBackward0": ("condition",)})


def _constants(node: Node, name: str) -> list[Tensor | None]:
    """What a product multiplies with, and needs no gradient."""
    names = {"MulBackward0": ("self", "other"), "DotBackward0": ("self", "tensor")}.get(name, ())
    return [
        saved_tensor(node, names[1 - i])
        for i, (each, _) in enumerate(node.next_functions[: len(names)])
        if each is not None and node.next_functions[1 - i][0] is None
    ]


def number_of(value: Tensor) -> Number:
    """A tensor of one element as a number, if the host has it; on a GPU it stays there."""
    value = value.detach()
    return float(value) if value.device.type == "cpu" else value.double().reshape(())


# -- operations ------------------------------------------------------------------------------------------------------

_LINEAR = frozenset(
    {
        "NegBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "AliasBackward0",
        "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0",
        "PermuteBackward0", "TransposeBackward0", "TBackward0", "CopyBackwards", "AddBackward1", "SubBackward1",
        "RsubBackward1", "NanToNumBackward0",
    }
)  # fmt: skip
_NEGATIONS = frozenset({"NegBackward0", "RsubBackward1"})
_SIGNS = MappingProxyType(
    {
        "AddBackward0": lambda alpha: (1.0, alpha),
        "SubBackward0": lambda alpha: (1.0, -alpha),
        "RsubBackward0": lambda alpha: (-alpha, 1.0),
    }
)
_ADDITIONS = frozenset({*_SIGNS, "StackBackward0", "CatBackward0"})
_SUMS = frozenset({"SumBackward0", "SumBackward1", "NansumBackward0"})
_DIVISIONS = frozenset({"DivBackward0", "DivBackward1"})
_PRODUCTS = frozenset({"MulBackward0", "MulBackward1"})
# Straight on either side of a value, so parts of a batch may agree with the whole.
_KINKED = frozenset(
    {
        "AbsBackward0", "ReluBackward0", "LeakyReluBackward0", "EluBackward0", "ClampBackward0", "ClampBackward1",
        "ClampMinBackward0", "ClampMinBackward1", "ClampMaxBackward0", "ClampMaxBackward1", "HardtanhBackward0",
        "ThresholdBackward0", "MaximumBackward0", "MinimumBackward0", "MaxBackward0", "MaxBackward1", "MinBackward0",
        "MinBackward1", "WhereBackward0",
    }
)  # fmt: skip
_MEAN = 1  # torch's number of reduction="mean"


def _of_mean(node: Node) -> Number:
    return float(prod(saved_value(node, "self_sym_sizes")))


def _of_mean_over_dims(node: Node) -> Number:
    sizes = saved_value(node, "self_sym_sizes")
    # torch saves dims as numbers without sign.
    dims = {(dim + 2**63) % 2**64 - 2**63 for dim in saved_value(node, "dim") or range(len(sizes))}
    return float(prod(sizes[dim] for dim in dims))


def _of_labels(node: Node) -> Number | None:
    if int(saved_value(node, "reduction")) != _MEAN:
        return None
    total = saved_tensor(node, "total_weight")
    return None if total is None else number_of(total)


def _of_elements(node: Node) -> Number | None:
    return float(prod(shape_of_operand(node, 0) or ())) if int(saved_value(node, "reduction")) == _MEAN else None


def _of_rows(node: Node) -> Number | None:
    shape = shape_of_operand(node, 0)
    rows = shape[0] if shape is not None and len(shape) > 1 else 1
    return float(rows) if int(saved_value(node, "reduction")) == _MEAN else None


_MEANS = MappingProxyType(
    {
        "MeanBackward0": _of_mean,
        "MeanBackward1": _of_mean_over_dims,
        "NllLossBackward0": _of_labels,
        "NllLoss2DBackward0": _of_labels,
        **dict.fromkeys(
            (
                "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "BinaryCrossEntropyBackward0",
                "BinaryCrossEntropyWithLogitsBackward0", "SoftMarginLossBackward0",
            ),
            _of_elements,
        ),
        **dict.fromkeys(("MultiMarginLossBackward0", "MultilabelMarginLossBackward0"), _of_rows),
    }
)  # fmt: skip
