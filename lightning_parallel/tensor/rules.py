"""Matches the patterns of a plan to modules. What doesn't fit is refused, with a suggestion of what would."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torch import nn

from lightning_parallel.tensor.adapters import without_adapters
from lightning_parallel.tensor.layer import ParallelLayer
from lightning_parallel.tensor.linear import is_linear
from lightning_parallel.tensor.style import Plan, Rule
from lightning_parallel.tensor.styles import read_style


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
            style = read_style(text)
        except ValueError as error:
            raise ValueError(f"plan: {pattern!r}: {error}") from None
        matched = matching(pattern, modules)
        if not matched:
            close = _enumerate(_close(module, pattern))
            raise ValueError(f"plan: {pattern!r} matches no module. Did you mean {close}?")
        for name in matched:
            found = modules[name]
            for rule in without_adapters(Rule(found, tuple(names_of[id(found)]), pattern, style)):
                before = rules.setdefault(id(rule.module), rule)
                if before.pattern != pattern:
                    raise ValueError(f"plan: both {before.pattern!r} and {pattern!r} match {name!r}: leave one.")
                if isinstance(rule.module, ParallelLayer):
                    raise RuntimeError(rule.misfit(": it is divided already."))
                rule.style.check(rule)
    return list(rules.values())


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The dotted names that a pattern matches, in which ``*`` stands for one whole part."""
    regex = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
    return [name for name in names if regex.fullmatch(name)]


def layers_of(module: nn.Module) -> str:
    """The names of the layers that a plan can divide, those of equal blocks once."""
    found = {
        pattern_of(module, name): type(layer).__name__
        for name, layer in module.named_modules()
        if is_linear(layer) or isinstance(layer, nn.Embedding)
    }
    return ", ".join(f"{name!r} ({kind})" for name, kind in found.items()) or "none that could be divided"


def _close(module: nn.Module, pattern: str) -> list[str]:
    """Patterns that look like ``pattern`` and match something."""
    every = list(dict.fromkeys(pattern_of(module, name) for name, _ in module.named_modules() if name))
    return difflib.get_close_matches(pattern, every, n=3, cutoff=0.5) or every[:5]


def pattern_of(module: nn.Module, name: str) -> str:
    """``name``, with a ``*`` for each part that is one of several modules of the same class."""
    parts, around = [], module
    for part in name.split("."):
        kinds = {type(child) for child in around.children()}
        parts.append("*" if part.isdecimal() and len(kinds) == 1 else part)
        around = around.get_submodule(part)
    return ".".join(parts)


def _enumerate(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
