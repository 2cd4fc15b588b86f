"""Which modules are divided, and how: rules by name, and where they come from.

A plan maps patterns to styles (:mod:`~lightning_parallel.tensor.styles`). A pattern is a dotted module name in which
``*`` stands for one whole part of it::

    {"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.down_proj": "row"}

Rules are strict. A pattern that matches nothing may leave one half of a column/row pair undivided. The model would then
compute something else without an error. So each pattern must match, each style must fit, and no module may have two
rules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import nn

from lightning_parallel.tensor.layer import ParallelLayer
from lightning_parallel.tensor.linear import is_linear
from lightning_parallel.tensor.style import Rule, Style
from lightning_parallel.tensor.styles import read_style

Plan = Mapping[str, str | Style]

# Styles of transformers' plans (5.23), with those that compute the same.
_TRANSFORMERS: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "column",
        "packed_colwise": "column:2",
        "colwise_gather_output": "column_gather",
        "colwise_rep": "column_gather",  # its name before 5.0
        "rowwise": "row",
        "rowwise_split_input": "row_split",
        "embedding_rowwise": "embedding",
        "replicated_with_grad_allreduce": "sum_gradient",
    }
)

# For models of transformers that bring no plan: by the name of the class, with names relative to it.
_SHIPPED: Mapping[str, Plan] = MappingProxyType(
    {
        "GPT2Model": {
            "wte": "embedding",
            "h.*.attn": "divide:num_heads,split_size",
            "h.*.attn.c_attn": "column:3",
            "h.*.attn.c_proj": "row",
            "h.*.mlp.c_fc": "column",
            "h.*.mlp.c_proj": "row",
        },
        "GPT2LMHeadModel": {"lm_head": "column_gather"},
        "GPT2DoubleHeadsModel": {"lm_head": "column_gather"},
    }
)


# -- where a plan comes from -------------------------------------------------------------------------------------


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
        plan, source = _transformers_plan(module), "no plan is known for this model"
    if not plan and not any(isinstance(m, ParallelLayer) for m in module.modules()):  # divided by hand needs none
        raise ValueError(
            f"Tensor parallelism needs a plan, but {source}: give plan={{'pattern': 'style'}}, or a "
            f"configure_tensor_parallel() method that returns one. The layers are {_layers_of(module)}."
        )
    return plan


def _transformers_plan(module: nn.Module) -> dict[str, str | Style]:
    plan: dict[str, str | Style] = {}
    roots: list[str] = []
    for name, model in module.named_modules():
        if "PreTrainedModel" not in _bases(model) or any(f"{name}.".startswith(root) for root in roots):
            continue  # what lies inside another one is in its plan
        prefix = f"{name}." if name else ""
        roots.append(prefix)
        own = _translated(dict(getattr(model, "tp_plan", None) or {}), name, model) or _shipped_plan(model)
        own = _without_scaled_embeddings(model, own)
        if not own:
            raise ValueError(
                f"Tensor parallelism needs a plan, but {type(model).__name__}{f' ({name})' if name else ''} brings "
                f"none: give plan={{'pattern': 'style'}}. The layers are {_layers_of(module)}."
            )
        plan |= {prefix + pattern: style for pattern, style in own.items()}
    return plan


def _translated(theirs: dict[str, str], name: str, model: nn.Module) -> dict[str, str | Style]:
    unknown = {pattern: style for pattern, style in theirs.items() if style not in _TRANSFORMERS}
    if unknown:
        # All or nothing: what remains might be one half of a pair.
        raise ValueError(
            f"The tensor parallel plan of {type(model).__name__}{f' ({name})' if name else ''} holds styles without "
            f"a counterpart here: {', '.join(f'{p!r}: {s!r}' for p, s in unknown.items())}. Give a plan of your own: "
            f"plan={{'pattern': 'style'}}."
        )
    return {pattern: _TRANSFORMERS[style] for pattern, style in theirs.items()}


def _without_scaled_embeddings(model: nn.Module, plan: dict[str, str | Style]) -> dict[str, str | Style]:
    """Gemma's embeddings multiply what they look up, in a forward of their own. Those stay whole, and so does a head
    that is tied to one."""
    whole = {
        id(part.weight)
        for part in model.modules()
        if isinstance(part, nn.Embedding) and type(part).forward is not nn.Embedding.forward
    }
    left = {
        rule.pattern
        for rule in (resolve(model, plan) if whole else ())
        if rule.style.is_alone and id(rule.module.weight) in whole
    }
    return {pattern: style for pattern, style in plan.items() if pattern not in left}


def _shipped_plan(model: nn.Module) -> dict[str, str | Style]:
    plan: dict[str, str | Style] = {}
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        for base in _bases(part) & _SHIPPED.keys():
            plan |= {prefix + pattern: style for pattern, style in _SHIPPED[base].items()}
    return plan


def _bases(module: nn.Module) -> set[str]:
    """The names of the transformers classes that a module is of. Not by isinstance, which would import them."""
    return {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.")}


# -- from patterns to modules ------------------------------------------------------------------------------------


def resolve(module: nn.Module, plan: Plan) -> list[Rule]:
    """The modules that the plan's patterns match, in the plan's order.

    Raises:
        ValueError: a style is unknown or doesn't fit its module, a pattern matches nothing, or a module has two rules.
        RuntimeError: a module is divided already.
    """
    names_of: dict[int, list[str]] = {}
    modules: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        if name:
            names_of.setdefault(id(submodule), []).append(name)
            modules[name] = submodule
    rules: dict[int, Rule] = {}
    for pattern, text in plan.items():
        try:
            style = read_style(text, _TRANSFORMERS)
        except ValueError as error:
            raise ValueError(f"plan: {pattern!r}: {error}") from None
        regex = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
        matched = [name for name in modules if regex.fullmatch(name)]
        if not matched:
            close = _enumerate(_close(module, pattern))
            raise ValueError(f"plan: {pattern!r} matches no module. Did you mean {close}?")
        for name in matched:
            found = modules[name]
            rule = rules.setdefault(id(found), Rule(found, tuple(names_of[id(found)]), pattern, style))
            if rule.pattern != pattern:
                raise ValueError(f"plan: both {rule.pattern!r} and {pattern!r} match {name!r}: leave one.")
            if isinstance(found, ParallelLayer):
                raise RuntimeError(rule.misfit(": it is divided already."))
            style.check(rule)
    return list(rules.values())


def _layers_of(module: nn.Module) -> str:
    """The layers that a plan can name, those of equal blocks once."""
    found = {
        _pattern_of(module, name): type(layer).__name__
        for name, layer in module.named_modules()
        if is_linear(layer) or isinstance(layer, nn.Embedding)
    }
    return ", ".join(f"{name!r} ({kind})" for name, kind in found.items()) or "none that could be divided"


def _close(module: nn.Module, pattern: str) -> list[str]:
    """Patterns that match something and look like ``pattern``."""
    every = list(dict.fromkeys(_pattern_of(module, name) for name, _ in module.named_modules() if name))
    return difflib.get_close_matches(pattern, every, n=3, cutoff=0.5) or every[:5]


def _pattern_of(module: nn.Module, name: str) -> str:
    """``name``, with a ``*`` for each part that is one of several modules of the same class."""
    parts, around = [], module
    for part in name.split("."):
        kinds = {type(child) for child in around.children()}
        parts.append("*" if part.isdecimal() and len(kinds) == 1 else part)
        around = around.get_submodule(part)
    return ".".join(parts)


def _enumerate(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
