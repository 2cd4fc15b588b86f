"""Which modules are divided, and how: a plan, and where it comes from.

A plan maps patterns to styles (:mod:`~lightning_parallel.tensor.styles`). A pattern is a dotted module name in which
``*`` stands for one whole part of it::

    {"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.down_proj": "row"}

Rules are strict. A pattern that matches nothing may leave one half of a column/row pair undivided. The model would then
compute something else without an error. So each pattern must match, each style must fit, and no module may have two
rules.
"""

from __future__ import annotations

from torch import nn

from lightning_parallel.tensor.layer import ParallelLayer
from lightning_parallel.tensor.rules import layers_of
from lightning_parallel.tensor.style import Plan, Style
from lightning_parallel.tensor.transformers_plans import transformers_plan


def find_plan(module: nn.Module, given: Plan | None = None) -> dict[str, str | Style]:
    """The plan for ``module``: the given one; else that of its ``configure_tensor_parallel()`` method; else those that
    the transformers models in it bring along, or that are shipped here for them (GPT-2).

    Raises:
        ValueError: there is none, or it holds a style of transformers that has no counterpart here.
    """
    hook = getattr(module, "configure_tensor_parallel", None)
    if given is not None:
        plan, source = dict(given), "plan={}"
    elif callable(hook):
        plan, source = dict(hook()), f"{type(module).__name__}.configure_tensor_parallel() returned {{}}"
    else:
        plan, source = transformers_plan(module), "no plan is known for this model"
    if not plan and not any(isinstance(m, ParallelLayer) for m in module.modules()):  # divided by hand needs none
        raise ValueError(
            f"Tensor parallelism needs a plan, but {source}: give plan={{'pattern': 'style'}}, or a "
            f"configure_tensor_parallel() method that returns one. The layers are {layers_of(module)}."
        )
    return plan
