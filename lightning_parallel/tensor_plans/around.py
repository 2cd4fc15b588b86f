"""Styles of modules that stay as they are, with a collective around their forward, or with divided parameters.

The module may be of any class. It gets one derived from it (:class:`Around`). So names, hooks on instances of its
class, attributes and ``isinstance`` hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.private.torch.modules import parameters_of
from lightning_parallel.private.torch.tensors import tree_map
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.layer import ParallelLayer, Site, check_plain
from lightning_parallel.tensor_plans.style import Rule, Style, over

Map = Callable[[Tensor, dist.ProcessGroup], Tensor]


@dataclass(frozen=True)
class Work:
    """What is done around a module's forward.

    Attributes:
        inputs: a function of each floating-point tensor that the module takes, and of the group; None for none.
        outputs: the same for what it returns.
        draws: the random numbers that the ranks draw inside, when training: "equal" or "different" ones; or "as
            before", those of the code around it.
        summands: its own parameters that stay whole, and of which each rank adds an equal share to a sum over ranks.
    """

    inputs: Map | None = None
    outputs: Map | None = None
    draws: Literal["as before", "equal", "different"] = "as before"
    summands: tuple[str, ...] = ()


class Around(ParallelLayer):
    """A module that runs with some work around it."""

    _work: Work

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        work = self._work
        args, kwargs = self._mapped(work.inputs, (args, kwargs))
        own: dict[str, Any] = parameters_of(self)  # type: ignore[assignment]
        kept = {name: own[name] for name in work.summands}
        if work.draws != "as before":
            self.site.leave_region()
            self.site.enter_region(work.draws == "different" and self.training)
        own.update({name: parameter / self.site.group.size() for name, parameter in kept.items()})
        try:
            output = super().forward(*args, **kwargs)
        finally:
            own.update(kept)
        if work.draws != "as before":
            self.site.leave_region()
        return self._mapped(work.outputs, output)

    def _mapped(self, function: Map | None, values: Any) -> Any:
        if function is None:
            return values
        return tree_map(
            lambda x: function(x, self.site.group) if isinstance(x, Tensor) and x.is_floating_point() else x, values
        )


def around(module: nn.Module, site: Site, work: Work) -> Around:
    """A new module like ``module``, with ``work`` around its forward. ``module`` stays as it is.

    Raises:
        ValueError: what ``module`` runs isn't its class's forward.
    """
    check_plain(module, type(module), list(module.state_dict()))
    derived: Any = type(f"Parallel{type(module).__name__}", (Around, type(module)), {})
    new: Around = derived.__new__(derived)
    vars(new).update(vars(module))
    vars(new).update(_parameters=dict(parameters_of(module)), shards={}, site=site, _work=work)
    return new


@dataclass(frozen=True)
class Copy(Style):
    """Keeps a module whole whose output divided code uses: the output's gradient is summed over the ranks.

    Args:
        features: how many of the last features of the output are used so; 0 for all. The others go to column layers,
            which sum their input's gradient themselves (as in DeepSeek's attention).
    """

    features: int = 0

    name = "copy"

    @classmethod
    def read(cls, options: str) -> Self:
        if not re.fullmatch(r"|[1-9]\d*", options):
            raise ValueError("Write 'copy', or 'copy:64' (so many of the last features).")
        return cls(int(options or 0))

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return around(rule.module, site, Work(outputs=self._copied))

    def _copied(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        if not self.features:
            return functions.copy(x, group)
        first, last = x.split([x.shape[-1] - self.features, self.features], -1)
        return torch.cat([first, functions.copy(last, group)], -1)


# -- modules whose own parameters are divided -------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters(Style):
    """Divides parameters that a module holds itself, and lets it work on divided values.

    Args:
        dims: the name of each parameter, the dimension that is divided, and the number of equal parts fused there.
        summands: the names of parameters that stay whole, and are added on each rank to something that is summed later.
    """

    dims: tuple[tuple[str, int, int], ...] = ()
    summands: tuple[str, ...] = ()

    name = "parameters"
    work: ClassVar[Work] = Work()

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
        layer = around(rule.module, site, replace(self.work, summands=self.summands))
        for name, dim, count in self.dims:
            whole = getattr(rule.module, name)
            layer.hold_shard(name, whole, dim, (whole.shape[dim] // count,) * count)
        return layer

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [getattr(module, name) for name in self.summands]


class Experts(Parameters):
    """Divides the matrices of a mixture of experts: each rank runs its part of every expert. The router stays whole, so
    all ranks choose the same experts. The inputs are whole, and the outputs are summed over the ranks."""

    name = "experts"
    work = Work(functions.copy, functions.reduce, draws="different")

    def check(self, rule: Rule) -> None:
        super().check(rule)
        if getattr(rule.module, "has_post_expert_norm", False):
            raise ValueError(rule.misfit(", whose experts end in a norm, which needs whole outputs: leave it out."))
