"""Matches the patterns of a plan to modules. What doesn't fit is refused, with a suggestion of what would.

A rule for a layer that PEFT has wrapped in an adapter becomes rules for the layers inside. LoRA keeps the layer as
``base_layer``, and adds ``lora_B(lora_A(dropout(x)))`` to what it returns. Of a column layer the outputs are divided,
so those of lora_B are too. Of a row layer the inputs are divided, so those of lora_A are::

              x ── base_layer (column) ──┐                      x piece ── base_layer (row) ──┐
              └─ lora_A ── lora_B ───────┴─ y piece              └─ lora_A (row) ── lora_B ───┴─ y
                           (column)

The trained copy of a layer that PEFT keeps beside it (``modules_to_save``) is divided as the layer is. PEFT's modules
are recognised by the names of their children, without importing PEFT.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from lightning_parallel.cuts.layers import matching
from lightning_parallel.tensor.layer import ParallelLayer, Site
from lightning_parallel.tensor.linear import is_linear
from lightning_parallel.tensor_plans.around import Work, around
from lightning_parallel.tensor_plans.style import Plan, Rule, Style
from lightning_parallel.tensor_plans.styles import Column, Divide, SharedHeads, read_style

_OF_LORA = {"base_layer", "lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B"}
_KEY_VALUE = ("k_proj", "v_proj")  # the names that all models of transformers use
_GROUPS = "num_key_value_groups"  # the query heads that share a key-value head


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
    for pattern, given in plan.items():
        try:
            style = read_style(given)
        except ValueError as error:
            raise ValueError(f"plan: {pattern!r}: {error}") from None
        text = given if isinstance(given, str) else style.name or type(style).__name__
        matched = matching(pattern, modules)
        if not matched:
            every = list(dict.fromkeys(pattern_of(module, name) for name in modules))
            close = difflib.get_close_matches(pattern, every, n=3, cutoff=0.5) or every[:5]
            raise ValueError(f"plan: {pattern!r} matches no module. Did you mean {', '.join(map(repr, close))}?")
        for name in matched:
            found = modules[name]
            for rule in without_adapters(Rule(found, tuple(names_of[id(found)]), pattern, text, style)):
                before = rules.setdefault(id(rule.module), rule)
                if before.pattern != pattern:
                    raise ValueError(f"plan: both {before.pattern!r} and {pattern!r} match {name!r}: leave one.")
                if isinstance(rule.module, ParallelLayer):
                    raise RuntimeError(rule.misfit(": it is divided already."))
                rule.style.check(rule)
    return list(rules.values())


def layers_of(module: nn.Module) -> str:
    """The names of the layers that a plan can divide, those of equal blocks once."""
    found = {
        pattern_of(module, name): type(layer).__name__
        for name, layer in module.named_modules()
        if is_linear(layer) or isinstance(layer, nn.Embedding)
    }
    return ", ".join(f"{name!r} ({kind})" for name, kind in found.items()) or "none that could be divided"


def pattern_of(module: nn.Module, name: str) -> str:
    """``name``, with a ``*`` for each part that is one of several modules of the same class."""
    parts, around = [], module
    for part in name.split("."):
        kinds = {type(child) for child in around.children()}
        parts.append("*" if part.isdecimal() and len(kinds) == 1 else part)
        around = around.get_submodule(part)
    return ".".join(parts)


# -- layers in adapters of PEFT ----------------------------------------------------------------------------------


class Outside(Style):
    """Runs a dropout on whole activations: all ranks must draw the same mask."""

    in_sequence_blocks = True

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return around(rule.module, site, Work(draws="equal"))


def without_adapters(rule: Rule) -> list[Rule]:
    """The rules for the layers inside a module of PEFT's; ``rule`` itself if it is for no such module.

    Raises:
        ValueError: the adapter isn't plain LoRA.
    """
    children = dict(rule.module.named_children())
    if "original_module" in children and "modules_to_save" in children:
        kept = [f"modules_to_save.{name}" for name, _ in children["modules_to_save"].named_children()]
        return [_part(rule, name, rule.style) for name in ("original_module", *kept)]
    if "base_layer" not in children:
        return [rule]
    more = [name for name, child in children.items() if name not in _OF_LORA and any(True for _ in child.parameters())]
    if more or "lora_A" not in children or getattr(rule.module, "lora_variant", None):
        what = ", ".join(more) or "another method than LoRA"
        raise ValueError(rule.misfit(f" of PEFT with {what}: only plain LoRA is known under a tensor plan."))
    rules = [_part(rule, "base_layer", rule.style)]
    if rule.style.leaves_divided:
        rules += [_part(rule, name, rule.style) for name in _held(children, "lora_B")]
        rules += [_part(rule, name, Outside()) for name in _held(children, "lora_dropout")]
    if rule.style.takes_divided:
        rules += [_part(rule, name, rule.style) for name in _held(children, "lora_A")]
    return rules


def _held(children: dict[str, nn.Module], container: str) -> Iterator[str]:
    for name, child in children[container].named_children():
        if not isinstance(child, nn.Identity):
            yield f"{container}.{name}"


def _part(rule: Rule, name: str, style: Style) -> Rule:
    names = tuple(f"{whole}.{name}" for whole in rule.names)
    return replace(rule, module=rule.module.get_submodule(name), names=names, style=style, wrapper=f".{name}")


# -- fewer key-value heads than ranks ----------------------------------------------------------------------------


def with_few_heads(root: nn.Module, rules: Sequence[Rule], count: int) -> list[Rule]:
    """The rules for ``count`` ranks, where column layers that project to fewer key-value heads become shared. A module
    tells its heads by ``head_dim`` and ``num_key_value_groups``, as attentions of transformers do. The latter becomes
    the number of query heads that a rank has."""
    adapted: list[Rule] = []
    groups: dict[str, Rule] = {}
    for rule in rules:
        heads = _heads(root, rule)
        # A subclass that gathers its output has all heads on each rank.
        if type(rule.style) is not Column or heads is None or heads >= count or count % heads:
            adapted.append(rule)
            continue
        adapted.append(replace(rule, style=SharedHeads(heads)))
        names = tuple(name.rpartition(".")[0] for name in rule.called_names)
        divide = Divide((f"{_GROUPS}/{count // heads}",))
        groups.setdefault(names[0], Rule(root.get_submodule(names[0]), names, rule.pattern, rule.text, divide))
    return [*adapted, *groups.values()]


def _heads(root: nn.Module, rule: Rule) -> int | None:
    """The number of key-value heads that a layer projects to; None if its module doesn't tell."""
    parent, _, own = rule.called_names[0].rpartition(".")
    around = vars(root.get_submodule(parent))
    size = around.get("head_dim")
    if own not in _KEY_VALUE or not isinstance(rule.module, nn.Linear) or type(around.get(_GROUPS)) is not int:
        return None
    if type(size) is not int or rule.module.out_features % size:
        return None
    return rule.module.out_features // size
