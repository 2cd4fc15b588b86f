"""Copies become equal, whatever they are made of."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.data.copies import make_equal
from tests.pool import WorkerPool


def copies(source: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    tensors = [
        nn.Parameter(torch.full((2, 3), float(rank))),
        torch.full((3, 2), rank, dtype=torch.int16).t(),  # not contiguous
        torch.tensor(bool(rank)),
        torch.full((4,), float(rank)).to(torch.float8_e4m3fn),
        torch.full((2,), complex(rank, rank)),
        torch.zeros(0, 3),
    ]
    group = dist.group.WORLD
    assert group is not None
    make_equal(tensors, source, group)
    tensors[3] = tensors[3].float()  # results can't be sent in 8 bits
    return [tensor.detach().clone() for tensor in tensors]


def test_all_ranks_have_what_the_source_has(pool: WorkerPool) -> None:
    for source in (0, 2):
        for found in pool.run(copies, 3, source):
            parameter, integers, flag, small, numbers, nothing = found
            assert torch.equal(parameter, torch.full((2, 3), float(source)))
            assert torch.equal(integers, torch.full((2, 3), source, dtype=torch.int16))
            assert bool(flag) == bool(source)
            assert small.tolist() == [source] * 4
            assert torch.equal(numbers, torch.full((2,), complex(source, source)))
            assert nothing.shape == (0, 3)
