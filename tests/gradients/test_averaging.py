"""Gradients are averaged over replicas, or summed over ranks, whatever order they come in, and whoever lacks one."""

from __future__ import annotations

from collections.abc import Callable
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


def as_a_whole(averager: GradientAverager, gradients: Gradients) -> None:
    """What is reported comes in another order on every rank, and "b" never."""
    names = [name for name in SHAPES if gradients[name] is not None and name != "b"]
    with averager.completing(SHAPES):
        for name in names[dist.get_rank() :] + names[: dist.get_rank()]:
            averager.ready(name, gradients[name])  # type: ignore[arg-type]


def in_parts(averager: GradientAverager, gradients: Gradients) -> None:
    """Some parameters' last backward comes before that of others, which grow meanwhile."""
    for part in (["c", "d"], ["a", "b", "rare"]):
        with averager.completing(part):
            for name in SHAPES:
                value = gradients[name]
                if value is not None and (name in part or name in ("a", "b")):
                    averager.ready(name, value if name in part else value + 100)


def not_at_all(averager: GradientAverager, gradients: Gradients) -> None:
    pass


def average(bucket_bytes: int, report: Callable[[GradientAverager, Gradients], None]) -> list[Gradients]:
    group = dist.group.WORLD
    assert group is not None
    averager = GradientAverager(parameters(), group, bucket_bytes)
    hosts = dist.new_group(range(group.size()))
    results = []
    for update in range(3):
        gradients = {name: gradient(name, dist.get_rank(), update) for name in SHAPES}
        report(averager, gradients)
        results.append(averager.finish(gradients))
        averager.ready("a", torch.ones(3, 2))  # outside of an update: nothing
        if report is not_at_all:
            trained = {name: parameter for name, parameter in parameters().items() if name != "frozen"}
            sums = summed_over(group, trained, gradients, hosts if update else None)
            means = {name: None if total is None else total / group.size() for name, total in sums.items()}
            results.append(means)
    return results


@pytest.mark.parametrize(
    ("ranks", "report", "bucket_bytes"),
    [(3, not_at_all, 60), (3, as_a_whole, 1), (3, as_a_whole, 2**20), (3, in_parts, 60), (1, as_a_whole, 60)],
)
def test_averages_and_sums_count_a_missing_gradient_as_zero(
    pool: WorkerPool, ranks: int, report: Any, bucket_bytes: int
) -> None:
    for results in pool.run(average, ranks, bucket_bytes, report):
        for number, averages in enumerate(results):
            assert averages.keys() == SHAPES.keys() - {"frozen"}
            for name, found in averages.items():
                update = number // 2 if report is not_at_all else number
                all_of_them = [gradient(name, rank, update) for rank in range(ranks)]
                present = [g for g in all_of_them if g is not None]
                if not present:
                    assert found is None
                    continue
                assert found is not None and found.shape == SHAPES[name] and found.dtype == present[0].dtype
                expected = torch.stack(present).sum(0) / ranks
                assert float((found - expected).abs().max()) < (1e-6 if name == "d" else 1e-15)


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
