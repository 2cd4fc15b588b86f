"""Rules for key-value projections to fewer heads than there are ranks; see :mod:`~lightning_parallel.tensor.heads`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lightning_parallel.tensor.linear_styles import Column, SharedHeads
from lightning_parallel.tensor.module_styles import Divide
from lightning_parallel.tensor.style import Rule

_KEY_VALUE = ("k_proj", "v_proj")  # the names that all models of transformers use
_GROUPS = "num_key_value_groups"  # the query heads that share a key-value head


def with_few_heads(root: nn.Module, rules: Sequence[Rule], count: int) -> list[Rule]:
    """The rules for ``count`` ranks. Column layers that project to fewer key-value heads than that become shared.

    A module tells its heads by ``head_dim`` and ``num_key_value_groups``, as attentions of transformers do. The latter
    becomes the number of query heads that a rank has.
    """
    adapted: list[Rule] = []
    groups: dict[str, Rule] = {}
    for rule in rules:
        heads = _heads(root, rule)
        if type(rule.style) is not Column or heads is None or heads >= count or count % heads:
            adapted.append(rule)
            continue
        adapted.append(replace(rule, style=SharedHeads(heads)))
        names = tuple(seat.rpartition(".")[0] for seat in rule.seats)
        divide = Divide((f"{_GROUPS}/{count // heads}",))
        groups.setdefault(names[0], Rule(root.get_submodule(names[0]), names, rule.pattern, divide))
    return [*adapted, *groups.values()]


def _heads(root: nn.Module, rule: Rule) -> int | None:
    """The number of key-value heads that a layer projects to; None if it isn't such a projection, or its module doesn't
    tell."""
    parent, _, own = rule.seats[0].rpartition(".")
    around = vars(root.get_submodule(parent))
    size = around.get("head_dim")
    if own not in _KEY_VALUE or not isinstance(rule.module, nn.Linear) or type(around.get(_GROUPS)) is not int:
        return None
    if type(size) is not int or rule.module.out_features % size:
        return None
    return rule.module.out_features // size
