"""Gradients are summed over ranks, whoever lacks one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.gradients.averaging import GradientAverager, summed_over
from tools.workers.pool import WorkerPool

SHAPES = {"a": (3, 2), "b": (5,), "c": (), "frozen": (4,), "d": (2, 2), "rare": (3,), "never": (2,)}
Gradients = dict[str, Tensor | None]


def parameters() -> dict[str, Tensor]:
    made = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    made["d"] = made["d"].float()  # a bucket of its own
    return {name: p.requires_grad_(name != "frozen") for name, p in made.items()}


def gradient(name: str, rank: int, update: int) -> Tensor | None:
    if name in ("frozen", "never") or (name == "rare" and rank != 1):
        return None
    generator = torch.Generator().manual_seed(ord(name[0]) + 7 * rank)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(parameters()[name].dtype) + update


def sums() -> list[Gradients]:
    """As over gloo, and as over NCCL, where hosts tell each other which gradients there are."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    trained = {name: parameter for name, parameter in parameters().items() if name != "frozen"}
    ways = None, dist.new_group(range(group.size()))
    return [summed_over(group, trained, {n: gradient(n, rank, i) for n in SHAPES}, way) for i, way in enumerate(ways)]


def test_sums_count_a_missing_gradient_as_zero(pool: WorkerPool) -> None:
    """Averages, in parts too, are compared with one process in ``tests/strategies/test_contract.py``."""
    for results in pool.run(sums, 3):
        for update, totals in enumerate(results):
            assert totals.keys() == SHAPES.keys() - {"frozen"}
            for name, found in totals.items():
                present = [g for rank in range(3) if (g := gradient(name, rank, update)) is not None]
                if not present:
                    assert found is None
                    continue
                assert found is not None and found.shape == SHAPES[name] and found.dtype == present[0].dtype
                assert float((found - torch.stack(present).sum(0)).abs().max()) < (1e-5 if name == "d" else 1e-14)


def test_what_grows_after_it_was_complete_is_refused() -> None:
    trained = {name: torch.zeros(2, requires_grad=True) for name in "ab"}
    averager = GradientAverager(trained, None)  # type: ignore[arg-type]
    with averager.completing(["b"]):
        averager.ready("a", torch.ones(2))  # not yet complete
    with averager.completing(["a"]):
        averager.ready("a", torch.ones(2))
    with pytest.raises(RuntimeError, match="'a' grew twice.*use_reentrant=False"):
        averager.ready("a", torch.ones(2))


def test_a_device_is_not_waited_for_if_no_gradient_is_missing() -> None:
    """The meta device has no values: whatever read one would fail."""
    made = {name: torch.zeros(3, device="meta", requires_grad=True) for name in "abc"}
    gradients: Gradients = {name: torch.ones(3, device="meta") for name in made}
    group: Any = SimpleNamespace(size=lambda: 2)
    with patch.object(dist, "all_reduce", return_value=SimpleNamespace(wait=bool)):
        assert all(total is not None for total in summed_over(group, made, gradients).values())
        with pytest.raises(NotImplementedError):  # another rank may have it
            summed_over(group, made, {**gradients, "b": None})
        hosts: Any = object()  # the other rank's flags are this one's
        sums = summed_over(group, made, {**gradients, "b": None}, hosts)
        assert [name for name, total in sums.items() if total is None] == ["b"]
