"""Ranks that are alone along an axis send nothing along it: over NCCL a group of one rank would be connected too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.strategies.contract import LAYOUTS, Layout, Row, fit, staged
from tools.workers.pool import WorkerPool

COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "broadcast_object_list", "all_gather_object", "gather_object", "barrier",
)  # fmt: skip


def collectives_of_one(layout: Layout) -> list[str]:
    """Those that a fit on two ranks calls in a group of one rank."""
    found: list[str] = []

    def noting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            group = next((x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup)), None)
            found.extend([name] if dist.get_world_size(group) == 1 else [])
            return collective(*args, **kwargs)

        return noted

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(patch.object(dist, name, noting(name, getattr(dist, name))))
        fit(Row("TwoTerms", "1f1b", "clipping by norm"), layout, epochs=1)  # logs with sync_dist=True
    return found


@pytest.mark.parametrize("layout", [
    *(LAYOUTS[name] for name in ("1f1b", "async", "tensor", "replicas", "sharded")),
    staged(stages=1, data_parallel=2),
], ids=str)  # fmt: skip
def test_a_rank_alone_sends_nothing(pool: WorkerPool, layout: Layout) -> None:
    assert pool.run(collectives_of_one, 2, layout, init=False) == [[], []]
