"""Shards in torch's distributed checkpoint: what each rank writes is joined, and read back by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Shard0

from lightning_parallel.checkpoint.slices import Slices, on_host
from lightning_parallel.ranks.shard import Shard
from tests.strategies.harness import complete
from tools.workers.pool import WorkerPool

WHOLES = {  # by name: shape, divided dimension, fused parts
    "rows": ((7, 3), 0, ()),
    "columns": ((3, 7), 1, ()),
    "fused": ((3, 12), 1, (6, 3, 3)),
    "fused rows": ((12, 3), 0, (6, 3, 3)),
    "vector": ((5,), 0, ()),
}


def whole(name: str) -> Tensor:
    shape = WHOLES[name][0]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def state(fully_sharded: bool, fill: float | None = None) -> dict[str, Slices]:
    """This rank's shards of all, or as many of one value. Fully sharded, four ranks have two shards of each, and these
    are divided over two replicas once more."""
    made = {}
    for name, (shape, dim, parts) in WHOLES.items():
        tensor = whole(name) if fill is None else torch.full_like(whole(name), fill)
        if fully_sharded:
            shard = Shard(shape, dim, parts or (shape[dim],), dist.get_rank() % 2, 2)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["data"]
            local: Tensor = distribute_tensor(shard.take(tensor), mesh, [Shard0(0)], src_data_rank=None)
        else:
            shard = Shard.of(shape, dim, dist.group.WORLD, parts)
            local = shard.take(tensor)
        made[name] = Slices(local, shard)
    return made


def save(directory: Path, fully_sharded: bool) -> None:
    dcp.save(dict(state(fully_sharded)), checkpoint_id=directory)


def load(directory: Path, fully_sharded: bool) -> None:
    read = state(fully_sharded, fill=0.0)
    dcp.load(dict(read), checkpoint_id=directory)
    for name, slices in read.items():
        assert isinstance(slices.local, DTensor) == fully_sharded
        assert torch.equal(complete(slices.local), slices.shard.take(whole(name))), name


@pytest.mark.parametrize(("writers", "readers"), [
    ((2, False), [(3, False)]), ((4, True), [(4, True), (2, False)])
])  # fmt: skip
def test_shards_of_some_ranks_are_read_by_others(
    pool: WorkerPool, tmp_path: Path, writers: tuple[int, bool], readers: list[tuple[int, bool]]
) -> None:
    pool.run(save, writers[0], tmp_path, writers[1])
    for ranks, fully_sharded in readers:
        pool.run(load, ranks, tmp_path, fully_sharded)
    read = {name: torch.zeros_like(whole(name)) for name in WHOLES}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in read.items():
        assert torch.equal(tensor, whole(name)), name


def test_slices_are_not_to_be_computed_with() -> None:
    shard = Shard((4,), 0, (4,), 0, 2)
    with pytest.raises(RuntimeError, match="saved and loaded, not computed with"):
        Slices(torch.zeros(2), shard) + 1


class Gpu:
    """The streams of a GPU whose copies to the host land when a stream is waited for."""

    def __init__(self) -> None:
        self.under_way: list[Callable[[], Any]] = []

    def synchronize(self) -> None:
        while self.under_way:
            self.under_way.pop()()


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    gpu: Gpu
    is_cuda, device = True, torch.device("cuda", 0)  # type: ignore[assignment]

    @classmethod
    def of(cls, values: Tensor, gpu: Gpu) -> OnGpu:
        made = values.as_subclass(cls)
        made.gpu = gpu
        return made

    def detach(self) -> OnGpu:
        return self

    def narrow(self, *where: int) -> OnGpu:  # type: ignore[override]
        return OnGpu.of(self.as_subclass(Tensor).narrow(*where), self.gpu)

    def to(self, device: str, *, non_blocking: bool, copy: bool) -> Tensor:  # type: ignore[override]
        assert device == "cpu" and non_blocking and copy
        host = torch.full(self.shape, torch.nan, dtype=self.dtype)
        self.gpu.under_way.append(lambda: host.copy_(self.as_subclass(Tensor)))
        return host


def test_options_are_copied_too() -> None:
    options = {"betas": [0.9]}
    copy = on_host(options)
    assert copy == options and copy["betas"] is not options["betas"]


@pytest.mark.gpu
def test_copies_on_the_host_are_pinned() -> None:
    values = torch.arange(6.0, device="cuda").view(2, 3).T
    copy = on_host(values)
    assert copy.is_pinned() and torch.equal(copy, values.cpu())
