"""Shards in torch's distributed checkpoint: what each rank writes is joined, and read back by any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Shard0

from lightning_parallel.checkpoint.slices import Slices
from lightning_parallel.ranks.shard import Shard
from tests.pool import WorkerPool

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


def save(directory: Path) -> None:
    state: dict[str, Tensor] = {}
    for name, (shape, dim, parts) in WHOLES.items():
        shard = Shard.of(shape, dim, dist.group.WORLD, parts)
        state[name] = Slices(shard.take(whole(name)), shard)
    dcp.save(state, checkpoint_id=directory)


def load(directory: Path) -> None:
    state = {}
    for name, (shape, dim, parts) in WHOLES.items():
        shard = Shard.of(shape, dim, dist.group.WORLD, parts)
        state[name] = Slices(torch.zeros_like(shard.take(whole(name))), shard)
    dcp.load(dict(state), checkpoint_id=directory)
    for name, slices in state.items():
        assert torch.equal(slices.local, slices.shard.take(whole(name))), name


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (3, 2)])
def test_shards_of_some_ranks_are_read_by_others(pool: WorkerPool, tmp_path: Path, writers: int, readers: int) -> None:
    pool.run(save, writers, tmp_path)
    pool.run(load, readers, tmp_path)
    state = {name: torch.zeros_like(whole(name)) for name in WHOLES}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, whole(name)), name


def fully_sharded(tensor: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["data"]
    return distribute_tensor(tensor, mesh, [Shard0(0)], src_data_rank=None)


def of_tensor_rank(shape: tuple[int, ...], dim: int, parts: tuple[int, ...]) -> Shard:
    """Of four ranks: two shards, each fully sharded over two replicas."""
    return Shard(shape, dim, parts or (shape[dim],), dist.get_rank() % 2, 2)


def save_fully_sharded(directory: Path) -> None:
    state: dict[str, Tensor] = {}
    for name, (shape, dim, parts) in WHOLES.items():
        shard = of_tensor_rank(shape, dim, parts)
        state[name] = Slices(fully_sharded(shard.take(whole(name))), shard)
    dcp.save(state, checkpoint_id=directory)


def load_fully_sharded(directory: Path) -> None:
    state = {}
    for name, (shape, dim, parts) in WHOLES.items():
        shard = of_tensor_rank(shape, dim, parts)
        state[name] = Slices(fully_sharded(torch.zeros_like(shard.take(whole(name)))), shard)
    dcp.load(dict(state), checkpoint_id=directory)
    for name, slices in state.items():
        assert isinstance(slices.local, DTensor)
        assert torch.equal(slices.local.full_tensor(), slices.shard.take(whole(name))), name


def test_fully_sharded_shards_are_written_and_read(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save_fully_sharded, 4, tmp_path)
    pool.run(load_fully_sharded, 4, tmp_path)
    pool.run(load, 3, tmp_path)
    state = {name: torch.zeros_like(whole(name)) for name in WHOLES}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, whole(name)), name


def test_slices_are_not_to_be_computed_with() -> None:
    shard = Shard((4,), 0, (4,), 0, 2)
    with pytest.raises(RuntimeError, match="saved and loaded, not computed with"):
        Slices(torch.zeros(2), shard) + 1
