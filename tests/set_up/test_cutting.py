"""All ranks cut a module alike, or all say why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.cuts.search import partition
from lightning_parallel.set_up.cutting import check_equal
from tests.strategies.harness import make_trainer
from tests.strategies.models import LeNet
from tools.workers.pool import WorkerPool


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def step(self, order: list[int]) -> Tensor:
        x = torch.ones(2)
        for i in order:
            x = self.layers[i](x)
        return x


def parts_of_rank(orders: list[list[int]]) -> Partition:
    net = Branches()
    return partition(net, lambda: net.step(orders[dist.get_rank()]), 2)


def compared(orders: list[list[int]]) -> None:
    assert dist.group.WORLD is not None
    check_equal(parts_of_rank(orders), dist.group.WORLD)


@pytest.mark.parametrize(("other", "words"), [
    ([0, 2, 1], "call 2 is 'layers.1' on the first rank, and 'layers.2' on rank 1"),
    ([0, 1], "call 3 is 'layers.2' on the first rank, and the end on rank 1"),
])  # fmt: skip
def test_ranks_that_see_other_calls_are_told_the_first(pool: WorkerPool, other: list[int], words: str) -> None:
    answers = pool.run(compared, 2, [[0, 1, 2], other], expect_errors=True)
    assert all(words in str(answer) for answer in answers)


class Uneven(LeNet):
    """Fails in the dry run on one rank only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if rank_zero_only.rank == 1:
            raise KeyError("no luck")
        return super().training_step(batch, batch_idx)


def fit_uneven() -> None:
    make_trainer("sync", [], {}, max_epochs=1).fit(Uneven(), LeNet.loader())


def test_a_look_that_fails_on_one_rank_is_refused_on_all(pool: WorkerPool) -> None:
    assert all("no luck" in str(failure) for failure in pool.run(fit_uneven, 2, init=False, expect_errors=True))
