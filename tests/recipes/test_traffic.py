"""recipes/traffic.py: every message is counted once, by its kind and at its size on the wire."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from recipes.traffic import Traffic
from tools.workers.pool import WorkerPool


def counted() -> dict[str, Any]:
    pair = dist.new_group([0, 1])
    with Traffic() as traffic:
        dist.all_reduce(torch.ones(6))
        dist.broadcast(torch.ones(6), 0)
        dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(6))
        functional.all_reduce(torch.ones(6), "sum", dist.group.WORLD).wait()
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(6), group=pair)
        if dist.get_rank() == 0:
            dist.send(torch.ones(6), 2)
        if dist.get_rank() == 2:
            dist.recv(torch.empty(6), 0)
    return {"sent": dict(traffic.sent), "messages": dict(traffic.messages), "received": traffic.received}


def test_every_kind_of_message_is_counted_with_its_group(pool: WorkerPool) -> None:
    first, second, third = pool.run(counted, 3)
    of_all = {"broadcast": 16, "all-gather": 16, "reduce-scatter": 16, "scalars": 3}  # 24 bytes, or parts of them
    assert third["sent"] == of_all | {"all-reduce": 64}
    assert third["received"] == 24 and third["messages"]["point-to-point"] == 1
    assert first["sent"] == second["sent"] != third["sent"] and first["received"] == 0
    assert first["sent"]["all-reduce"] == third["sent"]["all-reduce"] + 24
