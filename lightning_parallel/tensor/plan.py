"""Which modules are divided, and how: a plan, and where it comes from.

A plan maps patterns to styles (:mod:`~lightning_parallel.tensor.styles`). A pattern is a dotted module name in which
``*`` stands for one whole part of it::

    {"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.down_proj": "row"}

Rules are strict. A pattern that matches nothing may leave one half of a column/row pair undivided. The model would then
compute something else without an error. So each pattern must match, each style must fit, and no module may have two
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightning_parallel.tensor.finding import found_plan, table_of
from lightning_parallel.tensor.layer import ParallelLayer
from lightning_parallel.tensor.rules import layers_of
from lightning_parallel.tensor.style import Plan, Style
from lightning_parallel.tensor.transformers_plans import transformers_plan


def find_plan(
    module: nn.Module,
    given: Plan | None = None,
    count: int = 2,
    announce: Callable[[str], None] = lambda text: None,
) -> dict[str, str | Style]:
    """The plan for ``module``: the given one; else that of its ``configure_tensor_parallel()`` method; else those that
    the transformers models in it bring along, or that are shipped here for them; else one found by trying.

    Args:
        module: the whole model.
        given: by the user.
        count: the number of tensor ranks.
        announce: takes the words about a plan that was found.

    Raises:
        ValueError: there is none, or it holds a style of transformers that has no counterpart here.
    """
    hook = getattr(module, "configure_tensor_parallel", None)
    if given is not None:
        plan, source = dict(given), "plan={}"
    elif callable(hook):
        plan, source = dict(hook()), f"{type(module).__name__}.configure_tensor_parallel() returned {{}}"
    else:
        plan, source = transformers_plan(module, count, announce), "no plan is known for this model"
        example = getattr(module, "example_input_array", None)
        if not plan and example is not None:
            plan, source = _of_example(module, example, count, announce), "none was found with example_input_array"
    if not plan and not any(isinstance(m, ParallelLayer) for m in module.modules()):  # divided by hand needs none
        raise ValueError(
            f"Tensor parallelism needs a plan, but {source}: give plan={{'pattern': 'style'}}, or a "
            f"configure_tensor_parallel() method that returns one, or set example_input_array, by which one may be "
            f"found. The layers are {layers_of(module)}."
        )
    return plan


def _of_example(
    module: nn.Module, example: Any, count: int, announce: Callable[[str], None]
) -> dict[str, str | Style]:
    """A plan found by running the user's ``forward`` on Lightning's example input."""

    def run() -> None:
        if isinstance(example, Mapping):
            module(**example)
        else:
            module(*(example if isinstance(example, tuple) else (example,)))

    try:
        plan = found_plan(module, run, count)
    except Exception as error:  # any: of the user's code
        raise ValueError(
            f"Tensor parallelism needs a plan, and none was found: forward(example_input_array) raised "
            f"{type(error).__name__}: {error}. Give plan={{'pattern': 'style'}}. The layers are {layers_of(module)}."
        ) from error
    if plan:
        announce(f"No plan is given for tensor parallelism. Found by trying:\n{table_of(module, plan)}")
    return plan
