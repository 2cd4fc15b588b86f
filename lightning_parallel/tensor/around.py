"""Modules of any class that stay as they are, with a collective around their forward, or with divided parameters.

The new module is an instance of a class derived from the module's own. So names, hooks on instances of its class,
attributes and ``isinstance`` hold. It shares the children with the module that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.private.torch import parameters_of, tree_map
from lightning_parallel.tensor.layer import ParallelLayer, check_plain
from lightning_parallel.tensor.region import ShardedRegion

Map = Callable[[Tensor, dist.ProcessGroup], Tensor]


@dataclass(frozen=True)
class Work:
    """What is done around a module's forward.

    Attributes:
        inputs: a function of each floating-point tensor that the module takes, and of the group; None for none.
        outputs: the same for what it returns.
        region: left before the forward, so that all ranks draw the same random numbers; None where there is none.
        is_region: the module as a whole is such a region, when training.
        summands: the module's own parameters that stay whole, and of which each rank adds an equal share to a sum over
            the ranks.
    """

    inputs: Map | None = None
    outputs: Map | None = None
    region: ShardedRegion | None = None
    is_region: bool = False
    summands: tuple[str, ...] = ()


class Around(ParallelLayer):
    """A module that runs with some work around it."""

    _work: Work

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        work = self._work
        args, kwargs = self._mapped(work.inputs, (args, kwargs))
        own: dict[str, Any] = parameters_of(self)  # type: ignore[assignment]
        kept = {name: own[name] for name in work.summands}
        if work.region is not None:
            work.region.leave()
            if work.is_region and self.training:
                work.region.enter()
        own.update({name: parameter / self.group.size() for name, parameter in kept.items()})
        try:
            output = super().forward(*args, **kwargs)
        finally:
            own.update(kept)
        if work.region is not None:
            work.region.leave()
        return self._mapped(work.outputs, output)

    def _mapped(self, function: Map | None, values: Any) -> Any:
        if function is None:
            return values
        return tree_map(
            lambda x: function(x, self.group) if isinstance(x, Tensor) and x.is_floating_point() else x, values
        )


def around(module: nn.Module, group: dist.ProcessGroup, work: Work) -> Around:
    """A new module like ``module``, with ``work`` around its forward. ``module`` stays as it is.

    Raises:
        ValueError: what ``module`` runs isn't its class's forward.
    """
    check_plain(module, type(module), list(module.state_dict()))
    derived: Any = type(f"Parallel{type(module).__name__}", (Around, type(module)), {})
    new: Around = derived.__new__(derived)
    vars(new).update(vars(module))
    vars(new).update(_parameters=dict(parameters_of(module)), group=group, shards={}, _work=work)
    return new
