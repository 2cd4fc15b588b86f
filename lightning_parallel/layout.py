"""Which rank does what: axis sizes, coordinates, neighbours and process groups.

Three axes, the tensor axis running fastest, then data, then pipeline, so that tensor groups, which talk most, stay
inside a node. The pipeline axis is numbered backwards: the LAST stage is on global rank 0, because the loss, the
progress bar, the loggers and predictions are made there, and Lightning wants them on rank 0.

    pipeline=2, data=2, tensor=2:

        rank      0 1 2 3   4 5 6 7
        stage     1 1 1 1   0 0 0 0
        data      0 0 1 1   0 0 1 1
        tensor    0 1 0 1   0 1 0 1

Everything else in the package asks a :class:`Layout`, and knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

Axis = Literal["pipeline", "data", "tensor"]
Size = int | Literal["auto"]


@dataclass(frozen=True)
class Layout:
    """Axis sizes and this rank's place among them. Make one with :meth:`resolve`."""

    pipeline: int
    data: int
    tensor: int
    rank: int

    @classmethod
    def resolve(cls, world_size: int, rank: int = 0, *, pipeline: Size = 1, data: Size = 1, tensor: Size = 1) -> Layout:
        """Fill in ``"auto"`` sizes: such an axis takes the ranks that the others leave.

        Where several are ``"auto"``, the data axis gives way: it becomes 1.

        Raises:
            ValueError: a size is not a positive integer, or the axes don't multiply to ``world_size``.
        """
        sizes: dict[Axis, Size] = {"pipeline": pipeline, "data": data, "tensor": tensor}
        for axis, size in sizes.items():
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f"The size of the {axis} axis is {size!r}: it must be a positive integer or 'auto'.")
        automatic = [axis for axis, size in sizes.items() if size == "auto"]
        if len(automatic) > 1 and "data" in automatic:
            sizes["data"] = 1
            automatic.remove("data")
        if len(automatic) > 1:
            raise ValueError(
                f"The sizes of the {' and '.join(automatic)} axes are both 'auto', which {world_size} processes can "
                f"fill in several ways: give one of them a number."
            )
        given = 1
        for size in sizes.values():
            given *= size if isinstance(size, int) else 1
        asked = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        if world_size % given or (not automatic and world_size != given):
            wanted = f"a multiple of {given}" if automatic else str(given)
            raise ValueError(
                f"The layout {asked} does not fill {world_size} processes: set `devices` (x `num_nodes`) to {wanted}, "
                f"or change the axis sizes so that their product is {world_size}."
            )
        for axis in automatic:
            sizes[axis] = world_size // given
        resolved = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
        return cls(**resolved, rank=rank)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def stage(self) -> int:
        """This rank's pipeline stage, 0 being the one that sees the input."""
        return self.pipeline - 1 - self.rank // (self.data * self.tensor)

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor % self.data

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline - 1

    @property
    def coordinate(self) -> str:
        """This rank's place as a word, for file names and logs: ``pp0.dp1.tp0``."""
        return f"pp{self.stage}.dp{self.data_rank}.tp{self.tensor_rank}"

    def rank_of(self, *, stage: int | None = None, data: int | None = None, tensor: int | None = None) -> int:
        """The global rank at a coordinate; what isn't given is as on this rank."""
        stage = self.stage if stage is None else stage
        data = self.data_rank if data is None else data
        tensor = self.tensor_rank if tensor is None else tensor
        return ((self.pipeline - 1 - stage) * self.data + data) * self.tensor + tensor

    def at(self, rank: int) -> Layout:
        """The same layout seen from another rank."""
        return Layout(self.pipeline, self.data, self.tensor, rank)

    def peers(self, axis: Axis) -> list[int]:
        """Global ranks that differ from this one along ``axis`` only, this one included, in the axis's order."""
        if axis == "pipeline":
            return [self.rank_of(stage=stage) for stage in range(self.pipeline)]
        if axis == "data":
            return [self.rank_of(data=data) for data in range(self.data)]
        return [self.rank_of(tensor=tensor) for tensor in range(self.tensor)]

    def model_ranks(self) -> list[int]:
        """Global ranks that together hold the model of this one's replica, this one included, in ascending order."""
        return sorted(
            self.rank_of(stage=stage, tensor=tensor) for stage in range(self.pipeline) for tensor in range(self.tensor)
        )

    def describe(self, rank: int) -> str:
        """``stage 0 (rank 3)``: how a rank is named in errors."""
        place = self.at(rank)
        others = f", replica {place.data_rank}" if self.data > 1 else ""
        others += f", shard {place.tensor_rank}" if self.tensor > 1 else ""
        return f"stage {place.stage}{others} (rank {rank})"


@dataclass(frozen=True)
class Groups:
    """The process groups of a layout, as this rank holds them.

    Attributes:
        pipeline, data, tensor: the group of this rank along each axis.
        model: of the ranks that hold one replica of the model: all stages, all tensor shards.
        forward_in, forward_out: the links to the previous and next stage for activations.
        backward_in, backward_out: the links from the next and to the previous stage for gradients.
            Over NCCL a group of its own for each pair and direction. Over gloo the pipeline's own group, where the
            two kinds run in opposite directions between any two ranks, and so never meet.
    """

    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    tensor: dist.ProcessGroup
    model: dist.ProcessGroup
    forward_in: dist.ProcessGroup | None
    forward_out: dist.ProcessGroup | None
    backward_in: dist.ProcessGroup | None
    backward_out: dist.ProcessGroup | None


def make_groups(layout: Layout, timeout: timedelta | None = None, device: torch.device | None = None) -> Groups:
    """Create every group of the layout. All ranks call it, and all create all groups in the same order, which
    ``torch.distributed.new_group`` demands.

    Links are used once, by a first message, in that order too: NCCL connects two ranks at their first message, and
    both wait for it; left to the first step, stages would wait for each other in a circle.

    Args:
        layout: the axes, as this rank sees them.
        timeout: of each group.
        device: of this rank, where the backend is NCCL.
    """
    mine: dict[str, dist.ProcessGroup | None] = {}
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    everyone = [layout.at(rank) for rank in range(layout.world_size)]

    def make(name: str, ranks: Sequence[int]) -> None:
        """The same ranks, the same group: each group of gloo's costs a thread that wakes a hundred times a second."""
        key = tuple(sorted(ranks))
        if key not in made:
            made[key] = dist.new_group(list(ranks), timeout=timeout)
        if layout.rank in ranks:
            mine[name] = made[key]

    axes: tuple[Axis, ...] = ("pipeline", "data", "tensor")
    for axis in axes:
        for place in everyone:
            if place.peers(axis)[0] == place.rank:  # each group is made once, by its first member's turn
                make(axis, place.peers(axis))
    for place in everyone:
        if place.model_ranks()[0] == place.rank:
            make("model", place.model_ranks())
    if dist.get_backend(mine["pipeline"]) == "nccl":
        _make_links(layout, timeout, device, mine)
    else:
        names = {"forward_in": not layout.is_first_stage, "forward_out": not layout.is_last_stage}
        names |= {"backward_in": not layout.is_last_stage, "backward_out": not layout.is_first_stage}
        mine |= {name: mine["pipeline"] for name, exists in names.items() if exists}
    return Groups(
        pipeline=_present(mine, "pipeline"),
        data=_present(mine, "data"),
        tensor=_present(mine, "tensor"),
        model=_present(mine, "model"),
        forward_in=mine.get("forward_in"),
        forward_out=mine.get("forward_out"),
        backward_in=mine.get("backward_in"),
        backward_out=mine.get("backward_out"),
    )


def _make_links(
    layout: Layout,
    timeout: timedelta | None,
    device: torch.device | None,
    mine: dict[str, dist.ProcessGroup | None],
) -> None:
    """A group of its own for each pair and direction, into ``mine``: NCCL runs what is posted on one group in the order
    in which it was posted, so messages of one kind would queue behind another."""
    for place in (layout.at(rank) for rank in range(layout.world_size)):
        if place.is_last_stage:
            continue
        pair = [place.rank, place.rank_of(stage=place.stage + 1)]
        for name, sender in (("forward", pair[0]), ("backward", pair[1])):
            group = dist.new_group(pair, timeout=timeout)
            if layout.rank not in pair:
                continue
            direction = "out" if layout.rank == sender else "in"
            mine[f"{name}_{direction}"] = group
            greeting = torch.zeros(1, device=device)
            receiver = pair[1] if sender == pair[0] else pair[0]
            if direction == "out":
                dist.send(greeting, receiver, group=group)
            else:
                dist.recv(greeting, sender, group=group)


def _present(groups: dict[str, dist.ProcessGroup | None], name: str) -> dist.ProcessGroup:
    group = groups[name]
    assert group is not None
    return group
