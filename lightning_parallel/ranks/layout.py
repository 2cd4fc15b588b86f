"""Which rank does what: the axes of parallelism, this rank's coordinate on each, and its peers.

An axis is one way to divide the work over the ranks. Axes are ordered from the fastest-running to the slowest, so the
ranks of a tensor group, which communicate most, stay inside a node::

    Layout.resolve(8, tensor=2, data=2, pipeline=2)

        rank       0 1 2 3   4 5 6 7
        tensor     0 1 0 1   0 1 0 1
        data       0 0 1 1   0 0 1 1
        pipeline   1 1 1 1   0 0 0 0      (counted backwards)

The pipeline axis is counted backwards: the last stage is on global rank 0. The loss, the logs and the predictions are
computed on the last stage, and Lightning expects them on rank 0.

A new axis is one more entry of :data:`AXES`. Sizes, coordinates, peers, process groups (``ranks/groups.py``), names in
errors and in checkpoints follow from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

Size = int | Literal["auto"]
Placement = tuple[int, ...]  # the stage of each chunk of a pipeline (schedules/actions.py)


@dataclass(frozen=True)
class Axis:
    """One way to divide the work over ranks.

    Attributes:
        name: the axis's name, and that of the argument of :meth:`Layout.resolve` which gives its size.
        short: its abbreviation in a coordinate, such as ``pp0.dp1.tp0``.
        member: the word for one rank along the axis in messages: "stage", "replica", "shard".
        setting: what a strategy calls its size.
        splits_model: True if ranks along the axis hold different parts of the model, False if each holds a copy.
        backwards: True if the axis's last coordinate has the lowest rank.
    """

    name: str
    short: str
    member: str
    setting: str
    splits_model: bool
    backwards: bool = False


AXES = (  # the fastest-running first
    Axis("tensor", "tp", "shard", "tensor_parallel", splits_model=True),
    Axis("data", "dp", "replica", "data_parallel", splits_model=False),
    Axis("pipeline", "pp", "stage", "stages", splits_model=True, backwards=True),
)
_PLACE = MappingProxyType({axis.name: place for place, axis in enumerate(AXES)})


@dataclass(frozen=True)
class Layout:
    """The sizes of all axes, and one rank's place on them. Made by :meth:`resolve`.

    Attributes:
        sizes: the number of ranks along each axis, in the order of :data:`AXES`.
        rank: the global rank from which the layout is seen.
    """

    sizes: tuple[int, ...]
    rank: int

    @classmethod
    def resolve(cls, world_size: int, rank: int = 0, **sizes: Size) -> Layout:
        """Fill in the sizes that are ``"auto"``: such an axis takes the ranks that the other axes leave.

        If several sizes are ``"auto"``, the data axis becomes 1.

        Args:
            world_size: the number of ranks.
            rank: the rank whose place is wanted.
            **sizes: the size of each axis by its name; 1 where none is given.

        Raises:
            ValueError: a size is not a positive integer, or the product of the sizes is not ``world_size``.
        """
        if unknown := sizes.keys() - _PLACE.keys():
            raise ValueError(f"There is no axis {min(unknown)!r}: the axes are {', '.join(_PLACE)}.")
        given: dict[str, Size] = {name: sizes.get(name, 1) for name in _PLACE}
        for name, size in given.items():
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f"The size of the {name} axis is {size!r}: it must be a positive integer or 'auto'.")
        automatic = [name for name, size in given.items() if size == "auto"]
        if len(automatic) > 1 and "data" in automatic:
            given["data"] = 1
            automatic.remove("data")
        if len(automatic) > 1:
            both = " and ".join(axis.setting for axis in reversed(AXES) if axis.name in automatic)
            raise ValueError(
                f"{both} are both 'auto', which {world_size} processes can fill in several ways: give one of them a "
                f"number."
            )
        product = math.prod(size for size in given.values() if isinstance(size, int))
        asked = " x ".join(f"{axis.setting}={given[axis.name]}" for axis in reversed(AXES))
        if world_size % product or (not automatic and world_size != product):
            wanted = f"a multiple of {product}" if automatic else str(product)
            raise ValueError(
                f"The layout {asked} does not fill {world_size} processes: set `devices` (x `num_nodes`) to {wanted}, "
                f"or change these settings so that their product is {world_size}."
            )
        left = world_size // product
        return cls(tuple(left if size == "auto" else int(size) for size in given.values()), rank)

    # -- sizes and coordinates -----------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return self.sizes[_PLACE[axis]]

    def index(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        place = _PLACE[axis]
        index = self.rank // math.prod(self.sizes[:place]) % self.sizes[place]
        return self.sizes[place] - 1 - index if AXES[place].backwards else index

    @cached_property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.size("pipeline")

    @cached_property
    def stage(self) -> int:
        """This rank's pipeline stage. Stage 0 sees the input."""
        return self.index("pipeline")

    @cached_property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1

    # -- other ranks ---------------------------------------------------------------------------------------------

    def at(self, rank: int) -> Layout:
        """The same layout, seen from another rank."""
        return replace(self, rank=rank)

    def rank_at(self, **indices: int) -> int:
        """The global rank at a coordinate, given by axis name. On axes that aren't given, it is this rank's."""
        assert indices.keys() <= _PLACE.keys(), f"{indices} on the axes {', '.join(_PLACE)}"
        rank, stride = 0, 1
        for axis, size in zip(AXES, self.sizes, strict=True):
            index = indices.get(axis.name, self.index(axis.name))
            rank += stride * (size - 1 - index if axis.backwards else index)
            stride *= size
        return rank

    def peers(self, axis: str) -> list[int]:
        """The global ranks that differ from this one along ``axis`` only, itself included, by their coordinate."""
        return [self.rank_at(**{axis: index}) for index in range(self.size(axis))]

    def model_peers(self) -> list[int]:
        """The global ranks that hold one copy of the model together, this one included, in ascending order."""
        ranks = {self.rank}
        for axis in AXES:
            if axis.splits_model:
                ranks = {peer for rank in ranks for peer in self.at(rank).peers(axis.name)}
        return sorted(ranks)

    def everyone(self) -> list[Layout]:
        """The layout as each rank sees it, in the order of ranks."""
        return [self.at(rank) for rank in range(self.world_size)]

    # -- names ---------------------------------------------------------------------------------------------------

    @property
    def coordinate(self) -> str:
        """This rank's place as a word, for checkpoints and logs: ``pp0.dp1.tp0``."""
        return ".".join(f"{axis.short}{self.index(axis.name)}" for axis in reversed(AXES))

    def describe(self, rank: int) -> str:
        """How errors name a rank: ``stage 0, replica 1 (rank 3)``."""
        there = self.at(rank)
        named = [
            f"{axis.member} {there.index(axis.name)}"
            for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True)
            if size > 1 or axis.name == "pipeline"
        ]
        return f"{', '.join(named)} (rank {rank})"
