"""Which modules are divided, and how: a plan, and where it comes from.

A plan maps patterns to styles (:mod:`~lightning_parallel.tensor.styles`). A pattern is a dotted module name in which
``*`` stands for one whole part of it::

    {"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.down_proj": "row"}

Rules are strict. A pattern that matches nothing may leave one half of a column/row pair undivided. The model would then
compute something else without an error. So each pattern must match, each style must fit, and no module may have two
rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from lightning_parallel.ranks.writes import digest
from lightning_parallel.tensor.finding import changed, found_plan, table_of
from lightning_parallel.tensor.layer import ParallelLayer
from lightning_parallel.tensor.rules import layers_of, resolve
from lightning_parallel.tensor.style import Plan, Style
from lightning_parallel.tensor.transformers_plans import caches_off, transformers_plans

MakeRun = Callable[[], Callable[[], Any]]  # makes what runs a step
Found = tuple[dict[str, str | Style] | None, str]  # rules (None: the step can't be tried), and why there aren't any


def find_plan(
    module: nn.Module,
    given: Plan | Literal["none"] | None = None,
    count: int = 2,
    announce: Callable[[str], None] = lambda text: None,
    make_run: MakeRun | None = None,
    agreed: Callable[[Found], Found] = lambda found: found,
) -> dict[str, str | Style]:
    """The plan for ``module``: the given one; else that of its ``configure_tensor_parallel()`` method; else those that
    the transformers models in it bring along, or that are shipped here for them; and where there are none, one found by
    trying.

    Args:
        module: the whole model, undivided.
        given: the user's plan; ``"none"`` to divide nothing; None to look for one.
        count: the number of tensor ranks.
        announce: called with the text about a plan that was found.
        make_run: makes a function that runs the module's step, to find a plan by; None if it can't be run.
        agreed: returns on all ranks what one of them has found.

    Raises:
        ValueError: there is none, or it holds a style of transformers that has no counterpart here.
    """
    hook = getattr(module, "configure_tensor_parallel", None)
    if given == "none":
        return {}
    if given is not None:
        plan, source = dict(given), "plan={}"
    elif callable(hook):
        plan, source = dict(hook()), f"{type(module).__name__}.configure_tensor_parallel() returned {{}}"
    else:
        plan, without = transformers_plans(module)
        source = ""
        if without or not plan:
            found, problem = agreed(_found(module, count, make_run))
            if found is None:
                plan, found = {}, {}
            if without:  # what lies in other models, or around them, is left as it is
                found = {name: style for name, style in found.items() if name.startswith(tuple(without))}
            if found:
                announce(f"A plan for tensor parallelism was found by trying:\n{table_of(module, found)}")
            elif all(rule.style.is_alone for rule in resolve(module, plan)):
                plan = {}
                source = f"{', '.join(without.values()) or 'the model'} brings none, and none was found: {problem}"
            plan = found | plan
    if not plan and not any(isinstance(m, ParallelLayer) for m in module.modules()):  # divided by hand needs none
        raise ValueError(
            f"Tensor parallelism needs a plan, but {source}. Give plan={{'pattern': 'style'}}, or a "
            f"configure_tensor_parallel() method that returns one; or plan='none', and each rank holds and computes "
            f"all of it. The layers are {layers_of(module)}."
        )
    return plan


def _found(module: nn.Module, count: int, make_run: MakeRun | None) -> Found:
    before = _contents(module)
    found: dict[str, str | Style] = {}
    problem = f"no pair of its layers could be divided over {count} ranks"
    try:
        with changed(caches_off(module)):
            found = found_plan(module, make_run(), count) if make_run is not None else {}
    except Exception as error:  # any: of the user's code
        problem = f"the first step, by which one is found, raised {type(error).__name__}: {error}"
    written = [name for name, content in _contents(module).items() if content != before[name]]
    if written:  # a teacher's average: each trial has changed it
        return None, f"the first step, by which one is found, writes into '{written[-1]}'"
    return found, problem


def _contents(module: nn.Module) -> dict[str, int]:
    """A digest of each parameter, since a copy of them all would take as much memory as the model."""
    return {name: 0 if each.is_meta else int(digest(each)) for name, each in module.named_parameters()}
