"""Styles of modules that aren't linear layers: they stay whole between divided layers, or are divided themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from lightning_parallel.tensor.around import OutputCopied, OutputReduced, OutputShared, around
from lightning_parallel.tensor.embedding import VocabParallelEmbedding
from lightning_parallel.tensor.style import Rule, Site, Style


class Embedding(Style):
    """Divides an embedding's table by ids."""

    name = "embedding"
    is_alone = True

    def check(self, rule: Rule) -> None:
        if not isinstance(rule.module, nn.Embedding):
            raise ValueError(rule.misfit(": it is for nn.Embedding."))

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return VocabParallelEmbedding.from_embedding(rule.module, group=site.group, shared=site.shared)

    def divided_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return dict(module.named_parameters(recurse=False))


@dataclass(frozen=True)
class Divide(Style):
    """Shares out integers that a module keeps, such as its number of heads.

    Args:
        attributes: the names of the integers; ``"groups/2"`` for one that is divided by 2, not by the number of ranks.
    """

    attributes: tuple[str, ...] = ()

    name = "divide"
    in_sequence_blocks = True

    @classmethod
    def read(cls, options: str) -> Self:
        if not re.fullmatch(r"\w+(/[1-9]\d*)?(,\w+(/[1-9]\d*)?)*", options):
            raise ValueError("Write 'divide:num_heads' or 'divide:num_heads,num_kv/2' (names of attributes).")
        return cls(tuple(options.split(",")))

    @property
    def text(self) -> str:
        return f"{self.name}:{','.join(self.attributes)}"

    def check(self, rule: Rule) -> None:
        for attribute in self._divisors(1):
            value = getattr(rule.module, attribute, None)
            if not isinstance(value, int) or isinstance(value, bool):
                integers = ", ".join(repr(k) for k, v in vars(rule.module).items() if type(v) is int) or "none"
                raise ValueError(rule.misfit(f" without an integer {attribute!r}. It has {integers}."))

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        for attribute, divisor in self._divisors(count).items():
            if getattr(rule.module, attribute) % divisor:
                raise ValueError(f"{rule.name!r} has {attribute}={getattr(rule.module, attribute)}, {over(count)}.")

    def divide_in_place(self, rule: Rule, root: nn.Module, count: int) -> None:
        module = root.get_submodule(rule.name)
        for attribute, divisor in self._divisors(count).items():
            setattr(module, attribute, getattr(module, attribute) // divisor)

    def _divisors(self, count: int) -> dict[str, int]:
        pairs = (attribute.partition("/") for attribute in self.attributes)
        return {name: int(divisor or count) for name, _, divisor in pairs}


class SumGradient(Style):
    """Keeps a module whole that works on divided values, such as a norm of each head."""

    name = "sum_gradient"
    in_sequence_blocks = True

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters())


# -- around modules that stay ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy(Style):
    """Keeps a module whole whose output divided code uses: the output's gradient is summed over the ranks.

    Args:
        features: how many of the last features of the output are used so; 0 for all. The others go to column layers,
            which sum their input's gradient themselves (the compressed keys and values of DeepSeek's attention).
    """

    features: int = 0

    name = "copy"

    @classmethod
    def read(cls, options: str) -> Self:
        if not re.fullmatch(r"|[1-9]\d*", options):
            raise ValueError("Write 'copy', or 'copy:64' (so many of the last features).")
        return cls(int(options or 0))

    @property
    def text(self) -> str:
        return f"{self.name}:{self.features}" if self.features else self.name

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return around(rule.module, OutputCopied, site, features=self.features)


class Reduce(Style):
    """Keeps a module whole whose output on each rank is a part of a sum."""

    name = "reduce"

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return around(rule.module, OutputReduced, site)


class DivideOutput(Style):
    """Keeps a module whole whose outputs are whole on every rank but are summed over the ranks later: each rank passes
    on an equal share."""

    name = "divide_output"

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return around(rule.module, OutputShared, site)

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters())


def over(count: int) -> str:
    """The end of an error about something that can't be shared out over ``count`` ranks."""
    return f"which can't be shared out over {count} tensor ranks"
