"""All ranks cut a module alike, or all say why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import functional

from tests.strategies.harness import train
from tests.strategies.models import LeNet
from tools.workers.pool import WorkerPool


class Uneven(LeNet):
    """On one rank its step does something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        layers = [*self.net]
        if rank_zero_only.rank == 1:
            if self.how == "fails":
                raise KeyError("no luck")
            del layers[8 if self.how == "leaves a layer out" else 9]
        for layer in layers:
            images = layer(images)
        return functional.cross_entropy(images, labels)


@pytest.mark.parametrize(("how", "words"), [
    ("leaves a layer out", "call 9 is 'net.8' on the first rank, and 'net.9' on rank 1"),
    ("ends early", "call 10 is 'net.9' on the first rank, and the end on rank 1"),
    ("fails", "no luck"),
])  # fmt: skip
def test_a_step_that_differs_on_one_rank_is_refused_on_all(pool: WorkerPool, how: str, words: str) -> None:
    failures = pool.run(train, 2, partial(Uneven, how), "sync", init=False, expect_errors=True)
    assert all(words in str(failure) for failure in failures)
