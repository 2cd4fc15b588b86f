"""Which layers are sharded, and how: rules by name, and where they come from.

A plan maps patterns to styles. A pattern is a dotted module name, in which ``*`` stands for one whole part of it:
``"model.layers.*.mlp.up_proj"``. The styles:

    column                      weight divided by output features; what comes out stays divided
    column:3                    the same for three equal projections fused in one weight, such as qkv
    column:512,128,128          for fused projections of these sizes
    column_gather               what comes out is gathered: every rank has all of it
    row                         weight divided by input features; takes what a column layer left divided
    row_split                   takes all features, of which each rank uses its own
    embedding                   an embedding's table divided by ids
    divide:num_heads,num_kv     not a layer: a module whose integers of these names are shared out over the ranks
    sum_gradient                not sharded, but works on what is: each rank has a part of its gradients

Rules are strict. A model of which half a column/row pair is sharded, because a pattern matches nothing, computes
something else without a word: so each pattern must match, each style must fit, and no module may have two rules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn

from lightning_parallel.tensor.layer import ParallelLayer

Plan = Mapping[str, str]

# Kinds of styles, with what may follow the colon.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "column": r"|[1-9]\d*(,[1-9]\d*)*",
        "column_gather": "",
        "row": "",
        "row_split": "",
        "embedding": "",
        "divide": r"\w+(,\w+)*",
        "sum_gradient": "",
    }
)

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


@dataclass(frozen=True)
class Style:
    """A style, read.

    Attributes:
        kind: what stands before the colon.
        parts: sizes of fused projections; one number is how many equal ones there are.
        attributes: names of the integers to divide.
    """

    kind: str
    parts: tuple[int, ...] = ()
    attributes: tuple[str, ...] = ()

    @classmethod
    def read(cls, style: str) -> Style:
        """Raises ValueError for a style that isn't one."""
        kind, _, rest = style.partition(":")
        if kind not in _KINDS:
            close = difflib.get_close_matches(_TRANSFORMERS.get(kind, kind), _KINDS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"unknown style {style!r}: {hint}There are {', '.join(_KINDS)}.")
        if not re.fullmatch(_KINDS[kind], rest):
            raise ValueError(
                f"style {style!r} can't be read: write 'column:3' (equal parts), 'column:512,128,128' (sizes of the "
                f"parts), 'divide:num_heads' (attributes), and the other styles without a colon."
            )
        if kind == "divide":
            return cls(kind, attributes=tuple(rest.split(",")))
        return cls(kind, parts=tuple(int(size) for size in rest.split(",") if size))


@dataclass(frozen=True)
class Rule:
    """One module with its style.

    Attributes:
        module: to be sharded.
        names: all under which it is registered.
        pattern: that matched.
        style: for it.
    """

    module: nn.Module
    names: tuple[str, ...]
    pattern: str
    style: Style

    @property
    def name(self) -> str:
        return self.names[0]


# -- where a plan comes from -------------------------------------------------------------------------------------


def find_plan(module: nn.Module, given: Plan | None = None) -> dict[str, str]:
    """The plan for ``module``: the one given, else that of its ``configure_tensor_parallel()`` hook, else those that
    the models of transformers in it bring along or that are shipped here for them (GPT-2).

    Raises:
        ValueError: there is none, or it holds a style of transformers that isn't known here.
    """
    hook = getattr(module, "configure_tensor_parallel", None)
    if given is not None:
        plan, source = dict(given), "plan={}"
    elif callable(hook):
        plan, source = dict(hook()), f"{type(module).__name__}.configure_tensor_parallel() returned {{}}"
    else:
        plan, source = _transformers_plan(module), "no plan is known for this model"
    if not plan and not any(isinstance(m, ParallelLayer) for m in module.modules()):  # sharded by hand needs none
        raise ValueError(
            f"Tensor parallelism needs a plan, but {source}: give plan={{'pattern': 'style'}}, or a "
            f"configure_tensor_parallel() method that returns one. The layers are {_layers_of(module)}."
        )
    return plan


def _transformers_plan(module: nn.Module) -> dict[str, str]:
    plan: dict[str, str] = {}
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


def _translated(theirs: dict[str, str], name: str, model: nn.Module) -> dict[str, str]:
    unknown = {pattern: style for pattern, style in theirs.items() if style not in _TRANSFORMERS}
    if unknown:
        # All or nothing: what remains might be one half of a pair.
        raise ValueError(
            f"The tensor parallel plan of {type(model).__name__}{f' ({name})' if name else ''} holds styles without "
            f"a counterpart here: {', '.join(f'{p!r}: {s!r}' for p, s in unknown.items())}. Give a plan of your own: "
            f"plan={{'pattern': 'style'}}."
        )
    return {pattern: _TRANSFORMERS[style] for pattern, style in theirs.items()}


def _without_scaled_embeddings(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Gemma's embeddings multiply what they look up, in a forward of their own: those stay whole, and so does a head
    that is tied to one. That breaks no pair, since both return whole outputs either way."""
    whole = {
        id(part.weight)
        for part in model.modules()
        if isinstance(part, nn.Embedding) and type(part).forward is not nn.Embedding.forward
    }
    left = {
        rule.pattern
        for rule in (resolve(model, plan) if whole else ())
        if rule.style.kind in ("embedding", "column_gather") and id(rule.module.weight) in whole
    }
    return {pattern: style for pattern, style in plan.items() if pattern not in left}


def _shipped_plan(model: nn.Module) -> dict[str, str]:
    plan: dict[str, str] = {}
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        for base in _bases(part) & _SHIPPED.keys():
            plan |= {prefix + pattern: style for pattern, style in _SHIPPED[base].items()}
    return plan


def _bases(module: nn.Module) -> set[str]:
    """Names of the classes of transformers that a module is of. Not by isinstance, which would import it."""
    return {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.")}


# -- from patterns to modules ------------------------------------------------------------------------------------


def resolve(module: nn.Module, plan: Plan) -> list[Rule]:
    """The modules that the plan's patterns match, in the plan's order.

    Raises:
        ValueError: a style is unknown or doesn't fit its module, a pattern matches nothing, a module has two rules.
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
            style = Style.read(text)
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
            _check_kind(rule)
    return list(rules.values())


def is_linear(module: nn.Module) -> bool:
    """Is it a ``nn.Linear``, or transformers' ``Conv1D``, the same with a transposed weight?"""
    return isinstance(module, nn.Linear) or "Conv1D" in _bases(module)


def _check_kind(rule: Rule) -> None:
    kind, module = rule.style.kind, rule.module
    found = f"plan: {rule.pattern!r}: {kind!r}, but {rule.name!r} is a {type(module).__name__}"
    if isinstance(module, ParallelLayer):
        raise RuntimeError(f"{found}: it is sharded already.")
    if kind == "divide":
        for name in rule.style.attributes:
            value = getattr(module, name, None)
            if not isinstance(value, int) or isinstance(value, bool):
                integers = [k for k, v in vars(module).items() if type(v) is int]
                raise ValueError(f"{found} without an integer {name!r}. It has {_enumerate(integers)}.")
    elif kind == "sum_gradient":
        if not any(True for _ in module.parameters()):
            raise ValueError(f"{found}, which has no parameters.")
    elif kind == "embedding":
        if not isinstance(module, nn.Embedding):
            raise ValueError(f"{found}: it is for nn.Embedding.")
    elif not is_linear(module):
        raise ValueError(f"{found}: it is for nn.Linear and transformers' Conv1D.")


def _layers_of(module: nn.Module) -> str:
    """The layers that a plan can name, those of equal blocks once."""
    found = {
        _pattern_of(module, name): type(layer).__name__
        for name, layer in module.named_modules()
        if is_linear(layer) or isinstance(layer, nn.Embedding)
    }
    return ", ".join(f"{name!r} ({kind})" for name, kind in found.items()) or "none that could be sharded"


def _close(module: nn.Module, pattern: str) -> list[str]:
    """Patterns that match something and look like ``pattern``."""
    every = list(dict.fromkeys(_pattern_of(module, name) for name, _ in module.named_modules() if name))
    return difflib.get_close_matches(pattern, every, n=3, cutoff=0.5) or every[:5]


def _pattern_of(module: nn.Module, name: str) -> str:
    """``name``, with a ``*`` for each part that is one of several modules of the same kind."""
    parts, around = [], module
    for part in name.split("."):
        kinds = {type(child) for child in around.children()}
        parts.append("*" if part.isdecimal() and len(kinds) == 1 else part)
        around = around.get_submodule(part)
    return ".".join(parts)


def _enumerate(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
