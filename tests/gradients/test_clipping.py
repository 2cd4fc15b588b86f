"""Clipped shards, parts and copies are what torch makes of the whole model's gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel.gradients.clipping import clip_by_norm
from tests.pool import WorkerPool
from tests.strategies.harness import joined, largest_difference, train

CPU = torch.device("cpu")
CLIP = 0.3


def gradient(part: int, number: int) -> Tensor:
    """The whole gradients of two parts' parameters; number 1 is fully sharded over the replicas, in some tests."""
    generator = torch.Generator().manual_seed(10 * part + number)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def clip() -> list[tuple[int, int, Tensor]]:
    """Two replicas of two parts, parts 1 apart; every parameter counts but for a second copy that both parts hold."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "part"))
    part = mesh.get_local_rank("part")
    held: list[Any] = []
    for number in range(2):
        full = gradient(part, number)
        parameter: Any = nn.Parameter(torch.zeros_like(full))
        if number == 1:
            place = [Shard(0)]
            parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(full[:2]), mesh["data"], place))
            mine = full.chunk(2)[mesh.get_local_rank("data")].contiguous()
            parameter.grad = DTensor.from_local(mine, mesh["data"], place)
        else:
            parameter.grad = full.clone()
        held.append(parameter)
    frozen = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    copy = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    copy.grad = torch.full((2,), 0.1, dtype=torch.float64)
    everything = [*held, frozen, copy]
    clip_by_norm(
        everything,
        CLIP,
        counted={*held, copy} if part == 0 else {*held},
        replicas=mesh["data"].get_group(),
        parts=mesh["part"].get_group(),
        device=CPU,
    )
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in (*held, copy)]
    dist.barrier()
    return [(part, number, value) for number, value in enumerate(found)]


def test_shards_parts_and_copies_are_clipped_as_one_model(pool: WorkerPool) -> None:
    whole = [nn.Parameter(torch.zeros(4, 3, dtype=torch.float64)) for _ in range(4)]
    for index, parameter in enumerate(whole):
        parameter.grad = gradient(*divmod(index, 2))
    copy = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    copy.grad = torch.full((2,), 0.1, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([*whole, copy], CLIP)
    for rank in pool.run(clip, 4):
        for part, number, value in rank:
            expected = copy.grad if number == 2 else whole[2 * part + number].grad
            assert expected is not None
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_a_norm_is_not_rounded_to_the_gradients_dtype() -> None:
    """Else it would depend on how gradients are grouped: 16.0935, rounded to 16.125, gives another factor."""
    parameter = nn.Parameter(torch.zeros(259, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    clip_by_norm([parameter], 1.0, counted={parameter}, replicas=None, parts=None, device=CPU)
    assert parameter.grad[0] == torch.tensor(259**-0.5, dtype=torch.bfloat16)


def test_fully_sharded_stages_are_clipped_by_value_as_one_process(pool: WorkerPool) -> None:
    clipping: dict[str, Any] = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}
    options = {"stages": 2, "microbatches": 2, "data_parallel_kind": "fully_shard"}
    # Tied weights are in no layer alone, so they stay whole: torch takes such a mix one by one only.
    reports = pool.run(train, 4, "GPT2", "sync", options, init=False, batch_size=4, **clipping)
    whole = pool.run(train, 2, "GPT2", "sync", {"microbatches": 4}, init=False, **clipping)
    assert largest_difference(joined(reports, "weights"), joined(whole, "weights")) < 1e-12
