"""Pipelines whose messages are announced from host to host, as over NCCL: the numbers of a single process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from lightning_parallel.ranks.groups import Groups
from tests.pipeline.test_no_host_reads import announced
from tests.strategies.equality import assert_equal
from tests.strategies.harness import Report, joined, largest_difference, train
from tests.thorough import thorough
from tools.workers.pool import WorkerPool


def train_announced(*args: Any, **kwargs: Any) -> Report:
    """Trains with announcements in a group of their own, beside the messages."""
    wires = Groups.wires
    with mock.patch.object(Groups, "wires", lambda groups, placement: announced(wires(groups, placement))):
        return train(*args, **kwargs)


@pytest.mark.parametrize(("stages", "schedule"), [(2, "zbv"), *thorough((3, "interleaved"), (2, "1f1b"))])
def test_announced_messages_train_as_in_one_process(pool: WorkerPool, single: Any, stages: int, schedule: str) -> None:
    options = {"schedule": schedule, "microbatches": 4}
    assert_equal(pool.run(train_announced, stages, "Blocks", "sync", options, init=False), single("Blocks"))


def test_an_endless_list_ends_where_messages_are_announced(pool: WorkerPool) -> None:
    options = {"microbatches": 2}
    found, expected = (pool.run(which, 2, "Blocks", "async", options, init=False) for which in (train_announced, train))
    assert found[0].losses == expected[0].losses
    assert largest_difference(joined(found, "weights"), joined(expected, "weights")) == 0
