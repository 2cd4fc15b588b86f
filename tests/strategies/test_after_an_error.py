"""A script that catches an error of one Trainer can go on to the next one, in the same processes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import Tensor

from lightning_parallel.ranks.collectives import PeerLostError
from tests.pool import WorkerPool
from tests.strategies.harness import Report, joined, largest_difference, make_trainer, train
from tests.strategies.shardable import Mixed
from tests.thorough import thorough

TIMEOUT = 100.0  # seconds


class Fails(Mixed):
    """In the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise ValueError("no luck")
        return super().training_step(batch, batch_idx)


def train_after(first: str, options: dict[str, Any], second: str) -> Report:
    # A stage that is ahead fails first. Nothing holds its model, so its connections close, with what it has sent last.
    begin = time.monotonic()
    with pytest.raises((ValueError, PeerLostError), match="no luck|broke"):
        make_trainer(first, [], {**options, "timeout": TIMEOUT}).fit(Fails(), Fails.loader())
    assert time.monotonic() - begin < TIMEOUT / 2
    return train("Mixed", second, max_epochs=1)


@pytest.mark.parametrize(
    ("first", "options", "second"),
    [
        ("async", {}, "sync"),
        *thorough(
            ("fsdp", {}, "fsdp"),
            ("sync", {}, "async"),
            ("async", {"stages": 2, "data_parallel": 2}, "sync"),
        ),
    ],
)
def test_the_next_trainer_has_the_numbers_that_it_has_alone(
    pool: WorkerPool, first: str, options: dict[str, Any], second: str
) -> None:
    ranks = 2 * options.get("data_parallel", 1)
    after = pool.run(train_after, ranks, first, options, second, init=False)
    alone = pool.run(train, ranks, "Mixed", second, max_epochs=1, init=False)
    assert [report.losses for report in after] == [report.losses for report in alone]
    weights = [joined(reports, "weights") for reports in (after, alone)]
    assert largest_difference(*weights) == 0
