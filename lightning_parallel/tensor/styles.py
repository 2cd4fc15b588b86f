"""The styles by which modules are divided over the tensor ranks::

    name in a plan              what it does
    column                      divides the weight by output features; the output stays divided
    column:3                    the same for three equal projections fused in one weight, such as qkv
    column:512,128,128          for fused projections of these sizes
    column_gather               gathers the output: every rank has all of it
    row                         divides the weight by input features; takes what a column layer left divided
    row_split                   takes all features, of which each rank uses its own
    embedding                   divides an embedding's table by ids
    divide:num_heads,num_kv     not a layer: a module whose integers of these names are shared out over the ranks
    sum_gradient                stays whole, but works on divided values: each rank has a part of its gradients
    heads:2                     a projection to fewer heads than there are ranks: each computes the one that it needs
    experts:gate_up=1x2,down=2  a module of experts, whose own parameters are divided along these dimensions
    parameters:sinks=0          a module's own parameters are divided, and it works on divided values
    copy, copy:64               stays whole; divided layers use its output (the last 64 features), so what comes back
                                as the output's gradient is a part
    reduce                      stays, and returns a part of its output: the parts are summed
    divide_output               stays, and returns its share of the output, since outputs are summed after it

A style that is listed in :data:`STYLES` can be named in a plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from lightning_parallel.tensor.linear_styles import Column, GatheredColumn, Row, SharedHeads, SplitRow
from lightning_parallel.tensor.module_styles import Copy, Divide, DivideOutput, Embedding, Reduce, SumGradient
from lightning_parallel.tensor.parameter_styles import Experts, Parameters
from lightning_parallel.tensor.style import Style

STYLES: Mapping[str, type[Style]] = MappingProxyType(
    {
        style.name: style
        for style in (
            Column, GatheredColumn, Row, SplitRow, SharedHeads, Embedding, Divide, SumGradient, Experts, Parameters,
            Copy, Reduce, DivideOutput,
        )
    }
)  # fmt: skip

# Styles of transformers' plans (5.23) for whole modules, with those that compute the same.
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "column",
        "packed_colwise": "column:2",
        "colwise_gather_output": "column_gather",
        "colwise_rep": "column_gather",  # its name before 5.0
        "rowwise": "row",
        "rowwise_split_input": "row_split",
        "rowwise_rep": "row_split",
        "embedding_rowwise": "embedding",
        "embedding_colwise": "embedding",
        "replicated_with_grad_allreduce": "sum_gradient",
        "all_reduce": "reduce",
        "moe_identity_expert": "divide_output",
    }
)


def read_style(style: str | Style) -> Style:
    """The style that a plan names; an object is taken as it is.

    Args:
        style: a name with its options, such as ``"column:3"``, or a :class:`~lightning_parallel.tensor.style.Style`.

    Raises:
        ValueError: there is no such style, or its options can't be read.
    """
    if isinstance(style, Style):
        return style
    name, _, options = style.partition(":")
    if name not in STYLES:
        close = difflib.get_close_matches(OTHER_NAMES.get(name, name), STYLES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown style {style!r}: {hint}There are {', '.join(STYLES)}.")
    try:
        return STYLES[name].read(options)
    except ValueError as error:
        raise ValueError(f"style {style!r} can't be read. {error}") from None
