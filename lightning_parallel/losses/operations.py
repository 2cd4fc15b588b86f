"""The operations of autograd's graphs that a loss is made of, by the names of their nodes."""

from __future__ import annotations

from math import prod
from types import MappingProxyType

from torch import Tensor
from torch.autograd.graph import Node

from lightning_parallel.private.torch.autograd import saved_tensor, saved_value, shape_of_operand

LINEAR = frozenset(
    {
        "NegBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0", "AliasBackward0",
        "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0",
        "PermuteBackward0", "TransposeBackward0", "TBackward0", "CopyBackwards", "AddBackward1", "SubBackward1",
        "RsubBackward1", "NanToNumBackward0",
    }
)  # fmt: skip
NEGATIONS = frozenset({"NegBackward0", "RsubBackward1"})
SIGNS = MappingProxyType(
    {
        "AddBackward0": lambda alpha: (1.0, alpha),
        "SubBackward0": lambda alpha: (1.0, -alpha),
        "RsubBackward0": lambda alpha: (-alpha, 1.0),
    }
)
ADDITIONS = frozenset({*SIGNS, "StackBackward0", "CatBackward0"})
SUMS = frozenset({"SumBackward0", "SumBackward1", "NansumBackward0"})
DIVISIONS = frozenset({"DivBackward0", "DivBackward1"})
PRODUCTS = frozenset({"MulBackward0", "MulBackward1"})
REDUCTIONS = frozenset(  # of one operand, whatever its shape
    {
        *LINEAR, *SUMS, "MeanBackward0", "MeanBackward1", "NormBackward0", "NormBackward1",
        "LinalgVectorNormBackward0", "SelectBackward0", "UnbindBackward0",
    }
)  # fmt: skip
# Straight on either side of a value, so parts of a batch may agree with the whole.
KINKED = frozenset(
    {
        "AbsBackward0", "ReluBackward0", "LeakyReluBackward0", "EluBackward0", "ClampBackward0", "ClampBackward1",
        "ClampMinBackward0", "ClampMinBackward1", "ClampMaxBackward0", "ClampMaxBackward1", "HardtanhBackward0",
        "ThresholdBackward0", "MaximumBackward0", "MinimumBackward0", "MaxBackward0", "MaxBackward1", "MinBackward0",
        "MinBackward1", "WhereBackward0",
    }
)  # fmt: skip
_MEAN = 1  # torch's number of reduction="mean"


def _of_mean_over_dims(node: Node) -> float:
    sizes = saved_value(node, "self_sym_sizes")
    # torch saves dims as numbers without sign.
    dims = {(dim + 2**63) % 2**64 - 2**63 for dim in saved_value(node, "dim") or range(len(sizes))}
    return float(prod(sizes[dim] for dim in dims))


def _of_labels(node: Node) -> Tensor | None:
    if int(saved_value(node, "reduction")) != _MEAN:
        return None
    return saved_tensor(node, "total_weight")


def _of_elements(node: Node) -> float | None:
    return float(prod(shape_of_operand(node, 0) or ())) if int(saved_value(node, "reduction")) == _MEAN else None


def _of_rows(node: Node) -> float | None:
    shape = shape_of_operand(node, 0)
    rows = shape[0] if shape is not None and len(shape) > 1 else 1
    return float(rows) if int(saved_value(node, "reduction")) == _MEAN else None


MEANS = MappingProxyType(
    {
        "MeanBackward0": lambda node: float(prod(saved_value(node, "self_sym_sizes"))),
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
