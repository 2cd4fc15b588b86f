"""What all divided layers share: their surroundings, a record of how they were cut, copies, and checks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_parallel.private.torch.modules import has_hooks
from lightning_parallel.ranks.shard import Shard
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.dropout import ShardedRegion


class Siblings:
    """``count`` layers that are usually called with the same tensor, one after the other, such as q, k and v. They
    share one ``copy`` of it, so autograd first adds up their gradients, then sends the sum::

        x --- copy --+-- q        backward:   dx = sum over ranks of (dx_q + dx_k + dx_v)
                     +-- k
                     +-- v

    Once all have been called, with one input or several, nothing is kept."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._called: set[int] = set()  # the layers, by id, since nothing was kept
        self._input: weakref.ref[Tensor] | None = None
        self._copy: Tensor | None = None

    def copy(self, x: Tensor, group: dist.ProcessGroup, layer: object) -> Tensor:
        """``functions.copy(x, group)``; layers that are called with this very ``x`` all get the same tensor."""
        if id(layer) in self._called:
            self._called = set()  # in the forward before, not all were called
        if self._copy is None or self._input is None or self._input() is not x:
            self._input, self._copy = weakref.ref(x), functions.copy(x, group)
        copy = self._copy
        self._called.add(id(layer))
        if len(self._called) == self._count:
            self._called, self._input, self._copy = set(), None, None
        return copy


@dataclass(frozen=True)
class Site:
    """What is around a divided layer.

    A layer that leaves its output divided enters the region, and one that takes divided input leaves it. In a block
    that works on pieces of the sequence a layer gets the gathered input, and scatters its sum along dimension 1.

    Attributes:
        group: the tensor group.
        region: entered after a column layer and left before a row layer; None where the block as a whole is the region.
        in_block: whether the layer is in a block that works on pieces of the sequence.
        siblings: shared by the layers that get the same input; None for a layer that has none.
    """

    group: dist.ProcessGroup
    region: ShardedRegion | None = None
    in_block: bool = False
    siblings: Siblings | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copied layer stands in the same place

    def __reduce__(self) -> Any:
        raise TypeError(
            "A divided layer can't be pickled: it belongs to a process group. Save the module's state_dict() instead."
        )

    def copied(self, x: Tensor, layer: object) -> Tensor:
        """The whole input of a layer that computes a part with it. Its gradients are summed over the ranks."""
        if self.in_block or not x.requires_grad:  # where it was gathered, they are summed
            return x
        if self.siblings is not None:
            return self.siblings.copy(x, self.group, layer)
        return functions.copy(x, self.group)

    def enter_region(self, training: bool) -> None:
        """Let the ranks draw different random numbers from here on, when ``training``."""
        if self.region is not None and training and self.group.size() > 1:
            self.region.enter()

    def leave_region(self) -> None:
        if self.region is not None:
            self.region.leave()


class ParallelLayer(nn.Module):
    """A layer of which each rank of a group holds a shard. It is made of the whole layer, which stays as it is, and of
    the group, or of what is around it.

    Attributes:
        site: what is around it.
        shards: how each divided parameter was cut, by its name in this layer.
    """

    site: Site
    shards: dict[str, Shard]

    def __init__(self, whole: Any, site: Site | dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.site, self.shards = site if isinstance(site, Site) else Site(site), {}
        self.train(whole.training)

    def hold_shard(self, name: str, whole: nn.Parameter, dim: int, parts: tuple[int, ...] = ()) -> None:
        """Hold this rank's shard of a parameter, trainable or frozen as the whole is, and the record of the cut.

        Raises:
            ValueError: as :meth:`.Shard.of`.
        """
        shard = self.shards[name] = Shard.of(whole.shape, dim, self.site.group, parts)
        parameter = nn.Parameter(shard.take(whole.detach()), whole.requires_grad)
        vars(parameter).update(vars(whole))  # by which a user's code may group it
        self.register_parameter(name, parameter)

    def extra_repr(self) -> str:
        here = "".join(f", {name} {list(getattr(self, name).shape)} here" for name in self.shards)
        return super().extra_repr() + here

    def reset_parameters(self) -> None:
        """Refused: what is drawn for a shard is no slice of what is drawn for the whole."""
        raise RuntimeError(
            f"{type(self).__name__}.reset_parameters(): a rank holds a shard. Draw the weights before the model is "
            f"divided, in __init__ or configure_model."
        )


def check_plain(
    layer: nn.Module,
    kind: type[nn.Module],
    held: Sequence[str],
    problem: str | None = None,
    *,
    keeps_forward_hooks: bool = False,
) -> None:
    """Refuse a layer that has more than the parameters in ``held`` and the forward of the class ``kind``, since that
    would be lost. ``problem`` is another reason to refuse it, in words that follow "it"."""
    if parametrize.is_parametrized(layer):
        problem = "has a parametrization (weight_norm, spectral_norm, ...), which works on the whole weight"
    elif problem is not None:
        pass
    elif isinstance(layer, kind) and type(layer).forward is not kind.forward:
        problem = f"is a subclass of nn.{kind.__name__} with a forward of its own"
    elif "forward" in vars(layer):
        problem = "has had its forward replaced"
    elif has_hooks(layer, on_outputs=not keeps_forward_hooks):
        problem = "has hooks (of weight_norm, spectral_norm or your own), which would be lost"
    elif extra := sorted(layer.state_dict().keys() - set(held)):
        names = " and ".join(f"a {name}" for name in held)
        problem = f"holds more than {names} ({', '.join(extra)}), which would be lost"
    if problem is not None:
        raise ValueError(f"A layer of type {type(layer).__name__} can't be divided over tensor ranks: it {problem}.")
