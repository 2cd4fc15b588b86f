"""Styles of modules whose own parameters are divided: experts that hold all their matrices in one, attention sinks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from lightning_parallel.tensor.around import DividedExperts, OwnDivided, around
from lightning_parallel.tensor.module_styles import over
from lightning_parallel.tensor.style import Rule, Site, Style


@dataclass(frozen=True)
class Parameters(Style):
    """Divides parameters that a module holds itself, and lets it work on divided values.

    Args:
        dims: for each parameter its name, the dimension along which it is divided, and the number of equal parts fused
            there.
        summands: the names of parameters that stay whole, and are added on each rank to something that is summed later.
    """

    dims: tuple[tuple[str, int, int], ...] = ()
    summands: tuple[str, ...] = ()

    name = "parameters"

    @classmethod
    def read(cls, options: str) -> Self:
        dims, summands = [], []
        for option in options.split(","):
            match = re.fullmatch(r"(\w+)=(?:(\d)(?:x([1-9]\d*))?|sum)", option)
            if match is None:
                raise ValueError(
                    f"Write '{cls.name}:up=1x2,down=2,bias=sum' (for each parameter the dimension that is divided, and "
                    f"how many equal parts are fused there, or 'sum': whole, and added to a sum over the ranks)."
                )
            if match[2] is None:
                summands.append(match[1])
            else:
                dims.append((match[1], int(match[2]), int(match[3] or 1)))
        return cls(tuple(dims), tuple(summands))

    @property
    def text(self) -> str:
        divided = [f"{name}={dim}" + (f"x{parts}" if parts > 1 else "") for name, dim, parts in self.dims]
        return f"{self.name}:{','.join([*divided, *(f'{name}=sum' for name in self.summands)])}"

    def check(self, rule: Rule) -> None:
        own = dict(rule.module.named_parameters(recurse=False))
        for name, dim, parts in (*self.dims, *((name, 0, 1) for name in self.summands)):
            if name not in own or dim >= own[name].dim() or own[name].shape[dim] % parts:
                shapes = ", ".join(f"{n!r} {list(p.shape)}" for n, p in own.items()) or "none"
                raise ValueError(rule.misfit(f" without such a parameter {name!r}. Its own ones are {shapes}."))

    def check_division(self, rule: Rule, root: nn.Module, rules: Sequence[Rule], count: int) -> None:
        """Sizes may be cut unevenly if all are equal, as those of an expert's two matrices are."""
        sizes = {name: getattr(rule.module, name).shape[dim] // parts for name, dim, parts in self.dims}
        for name, size in sizes.items():
            if size % count and len(set(sizes.values())) > 1:
                raise ValueError(f"{rule.name!r} has a parameter {name!r} of {size}, {over(count)}.")

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        layer = around(rule.module, OwnDivided, site, summands=self.summands)
        layer.divide({name: (dim, parts) for name, dim, parts in self.dims}, site.shared)
        return layer

    def divided_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return {name: getattr(module, name) for name, _, _ in self.dims}

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [getattr(module, name) for name in self.summands]


class Experts(Parameters):
    """Divides the matrices of a module of experts (a mixture of experts): each rank runs its part of every expert.

    The router stays whole. So all ranks choose the same experts.
    """

    name = "experts"

    def check(self, rule: Rule) -> None:
        super().check(rule)
        if getattr(rule.module, "has_post_expert_norm", False):
            raise ValueError(rule.misfit(", whose experts end in a norm, which needs whole outputs: leave it out."))

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        layer = around(rule.module, DividedExperts, site, summands=self.summands, region=site.region)
        layer.divide({name: (dim, parts) for name, dim, parts in self.dims}, site.shared)
        return layer
