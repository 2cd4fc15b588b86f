"""Modules of any class that stay as they are, with a collective around their forward, or with divided parameters.

The new module is an instance of a class derived from the module's own. So names, hooks on instances of its class,
attributes and ``isinstance`` hold. It shares the children with the module that it replaces.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_parallel.shard import Shard
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.layer import ParallelLayer, shard_parameter
from lightning_parallel.tensor.region import ShardedRegion
from lightning_parallel.tensor.style import Site
from lightning_parallel.torch_private import has_hooks, parameters_of, tree_map

Kind = TypeVar("Kind", bound=ParallelLayer)


def around(module: nn.Module, kind: type[Kind], site: Site, **attributes: Any) -> Kind:
    """A new module like ``module``, which runs as ``kind`` says and has these ``attributes``. ``module`` stays as it
    is.

    Raises:
        ValueError: what ``module`` runs isn't its class's forward.
    """
    if "forward" in vars(module) or has_hooks(module):
        raise ValueError(
            f"A module of type {type(module).__name__} can't be divided over tensor ranks: it has hooks, or its "
            f"forward has been replaced."
        )
    derived: Any = type(f"Parallel{type(module).__name__}", (kind, type(module)), {})
    new: Kind = derived.__new__(derived)
    vars(new).update(vars(module))
    vars(new)["_parameters"] = dict(parameters_of(module))
    vars(new).update(group=site.group, shards={}, **attributes)
    return new


class OutputCopied(ParallelLayer):
    """Sums the gradient of the output's last ``features`` (0: all) over the ranks."""

    features: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.features:
            return tree_map(lambda x: _copied(x, self.group), output)
        first, last = output.split([output.shape[-1] - self.features, self.features], -1)
        return torch.cat([first, _copied(last, self.group)], -1)


class OutputReduced(ParallelLayer):
    """Sums the outputs over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda x: _reduced(x, self.group), super().forward(*args, **kwargs))


class OutputShared(ParallelLayer):
    """Returns an equal share of the outputs on each rank: the sum of the shares is the output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        count = self.group.size()
        return tree_map(lambda x: x / count if _is_value(x) else x, super().forward(*args, **kwargs))


class OutsideRegion(ParallelLayer):
    """Draws the same random numbers on all ranks, though it is called where a region may have been entered."""

    region: ShardedRegion | None
    _uncopied = ("group", "region")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.region is not None:
            self.region.leave()
        return super().forward(*args, **kwargs)


class OwnDivided(ParallelLayer):
    """A module whose own parameters are divided. Its input and output are divided values, or don't depend on them.
    Parameters in ``summands`` stay whole; each rank adds an equal share of them to a sum over the ranks."""

    summands: tuple[str, ...]

    def divide(self, dims: dict[str, tuple[int, int]], shared: dict[int, nn.Parameter]) -> None:
        """Replace parameters by this rank's shards.

        Args:
            dims: by parameter name, the dimension along which it is divided and the number of equal parts fused there.
            shared: the shards made so far, by the id of the whole parameter.

        Raises:
            ValueError: a dimension can't be divided.
        """
        for name, (dim, count) in dims.items():
            whole = getattr(self, name)
            size = whole.shape[dim]
            parts = (size // count,) * count
            self.shards[name] = Shard.of(whole.shape, dim, self.group, parts)
            parameters_of(self)[name] = shard_parameter(whole, self.shards[name], shared)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = parameters_of(self)  # type: ignore[assignment]
        kept = {name: own[name] for name in self.summands}
        own.update({name: parameter / self.group.size() for name, parameter in kept.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            own.update(kept)


class DividedExperts(OwnDivided):
    """Experts whose matrices are divided: the inputs are whole, and the outputs are summed over the ranks."""

    region: ShardedRegion | None
    _uncopied = ("group", "region")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: _copied(x, self.group), (args, kwargs))
        if self.region is not None and self.training:
            self.region.enter()
        output = super().forward(*args, **kwargs)
        if self.region is not None:
            self.region.leave()
        return tree_map(lambda x: _reduced(x, self.group), output)


def _is_value(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _copied(x: Any, group: Any) -> Any:
    return functions.copy(x, group) if _is_value(x) and x.requires_grad else x


def _reduced(x: Any, group: Any) -> Any:
    return functions.reduce(x, group) if _is_value(x) else x
