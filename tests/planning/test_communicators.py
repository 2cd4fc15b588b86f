"""planning/communicators.py: NCCL's buffers by their formula."""

from __future__ import annotations

import pytest

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.planning.communicators import nccl_buffers
from lightning_parallel.planning.layouts import Choice

MIB = 2**20
UNTIED = Partition(owners={}, uses={}, aliases={})
TIED = Partition(owners={"shared": (0, 3)}, uses={}, aliases={"shared": "shared"})
IN_A_ROW = [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("choice", "parts", "groups", "cuts"),
    [
        (Choice("single"), UNTIED, [0], [0]),
        (Choice("ddp", data=2), UNTIED, [1], [0]),  # Lightning's: the world alone
        (Choice("fully_sharded", data=2), UNTIED, [2], [0]),  # the world, and replicas
        (Choice("tensor_parallel", data=2, tensor=4), UNTIED, [3], [0]),  # the world, shards, replicas
        (Choice("pipeline_1f1b", 4, microbatches=4), UNTIED, [2] * 4, IN_A_ROW),  # the world, stages
        (Choice("pipeline_1f1b", 4, microbatches=4), TIED, [3, 2, 2, 3], IN_A_ROW),
        (Choice("pipeline_1f1b", 4, data=2, tensor=2, microbatches=4), UNTIED, [5] * 4, IN_A_ROW),  # and the model
        (Choice("pipeline_interleaved", 4, microbatches=4), UNTIED, [2] * 4, [3, 4, 4, 3]),
        (Choice("pipeline_zbv", 4, microbatches=4), UNTIED, [2] * 4, [2, 4, 4, 2]),  # the last one's are neighbours
    ],
    ids=str,
)
def test_groups_and_cuts_have_communicators(
    choice: Choice, parts: Partition, groups: list[int], cuts: list[int]
) -> None:
    for stage, (joined, crossed) in enumerate(zip(groups, cuts, strict=True)):
        assert nccl_buffers(choice, stage, parts, (24, 0)) == joined * 576 * MIB
        assert nccl_buffers(choice, stage, parts, (0, 32)) == crossed * 384 * MIB
        assert nccl_buffers(choice, stage, parts, (0, 0)) == 0
