"""Gradients are averaged over replicas, whatever order they come in, and whoever lacks one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.gradients.averaging import GradientAverager
from tests.pool import WorkerPool

SHAPES = {"a": (3, 2), "b": (5,), "c": (), "frozen": (4,), "d": (2, 2), "rare": (3,), "never": (2,)}


def parameters() -> dict[str, Tensor]:
    made = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    made["d"] = made["d"].float()  # a bucket of its own
    return {name: p.requires_grad_(name != "frozen") for name, p in made.items()}


def gradient(name: str, rank: int, update: int) -> Tensor | None:
    if name in ("frozen", "never") or (name == "rare" and rank != 1):
        return None
    generator = torch.Generator().manual_seed(ord(name[0]) + 7 * rank)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(parameters()[name].dtype) + update


def average(bucket_bytes: int, told: bool) -> list[dict[str, Tensor | None]]:
    """Three updates. What is told of comes in another order on every rank, and some is never told of."""
    rank = dist.get_rank()
    averager = GradientAverager(parameters(), dist.group.WORLD, bucket_bytes)
    results = []
    for update in range(3):
        gradients = {name: gradient(name, rank, update) for name in SHAPES}
        if told:
            averager.begin()
            names = [name for name in SHAPES if gradients[name] is not None and name != "b"]
            for name in names[rank:] + names[:rank]:
                value = gradients[name]
                assert value is not None
                averager.ready(name, value)
        results.append(averager.finish(gradients))
        averager.ready("a", torch.ones(3, 2))  # outside of an update: nothing
    return results


@pytest.mark.parametrize("bucket_bytes", [1, 60, 2**20])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_averages_count_a_missing_gradient_as_zero(pool: WorkerPool, ranks: int, told: bool, bucket_bytes: int) -> None:
    for results in pool.run(average, ranks, bucket_bytes, told):
        for update, averages in enumerate(results):
            assert averages.keys() == SHAPES.keys() - {"frozen"}
            for name, found in averages.items():
                all_of_them = [gradient(name, rank, update) for rank in range(ranks)]
                present = [g for g in all_of_them if g is not None]
                if not present:
                    assert found is None
                    continue
                assert found is not None and found.shape == SHAPES[name] and found.dtype == present[0].dtype
                expected = torch.stack(present).sum(0) / ranks
                assert float((found - expected).abs().max()) < (1e-6 if name == "d" else 1e-15)


def order_of_messages() -> Any:
    """When each bucket was sent, in words."""
    log: list[str] = []
    send = GradientAverager._send

    def logging(self: GradientAverager, bucket: Any) -> None:
        log.append("+".join(bucket.names))
        send(self, bucket)

    GradientAverager._send = logging  # type: ignore[method-assign]
    try:
        made = {name: torch.zeros(4, requires_grad=True) for name in "abcd"}
        averager = GradientAverager(made, dist.group.WORLD, bucket_bytes=32)
        averager.begin()
        for name in "cbda":  # b completes no bucket; d completes the first
            averager.ready(name, torch.ones(4))
            log.append(f"after {name}")
        averager.finish({})
    finally:
        GradientAverager._send = send  # type: ignore[method-assign]
    return log


def test_a_bucket_is_sent_as_soon_as_it_and_all_before_it_are_complete(pool: WorkerPool) -> None:
    expected = ["after c", "after b", "d+c", "after d", "b+a", "after a"]
    assert pool.run(order_of_messages, 2) == [expected] * 2


def grow_twice() -> None:
    averager = GradientAverager({name: torch.zeros(1, requires_grad=True) for name in "ab"}, dist.group.WORLD)
    averager.begin()
    averager.ready("a", torch.ones(1))
    averager.ready("a", torch.ones(1))


def test_a_gradient_that_grows_after_it_was_complete_is_refused(pool: WorkerPool) -> None:
    for failure in pool.run(grow_twice, 2, expect_errors=True):
        assert "RuntimeError: The gradient of 'a' grew twice in one backward" in failure
        assert "use_reentrant=False" in failure


def by_parts() -> list[dict[str, Tensor | None]]:
    """Two updates, in which some parameters' last backward comes before that of others, which grow meanwhile."""
    rank = dist.get_rank()
    averager = GradientAverager(parameters(), dist.group.WORLD, 1)
    results = []
    for update in range(2):
        gradients = {name: gradient(name, rank, update) for name in SHAPES}
        for part in (["c", "d"], ["a", "b", "rare"]):
            with averager.completing(part):
                for name in SHAPES:
                    value = gradients[name]
                    if value is not None and (name in part or name in ("a", "b")):
                        averager.ready(name, value if name in part else value + 100)
        results.append(averager.finish(gradients))
    return results


def test_each_part_of_a_model_may_have_a_last_backward_of_its_own(pool: WorkerPool) -> None:
    for results in pool.run(by_parts, 2):
        for update, averages in enumerate(results):
            for name in ("a", "b", "c", "d"):
                expected = torch.stack([gradient(name, rank, update) for rank in range(2)]).mean(0)  # type: ignore[misc]
                torch.testing.assert_close(averages[name], expected)


def test_what_grows_after_it_was_complete_is_refused() -> None:
    trained = {name: torch.zeros(2, requires_grad=True) for name in "ab"}
    averager = GradientAverager(trained, None)  # type: ignore[arg-type]
    with averager.completing(["b"]):
        averager.ready("a", torch.ones(2))  # not yet complete
    with averager.completing(["a"]):
        averager.ready("a", torch.ones(2))
    with pytest.raises(RuntimeError, match="'a' grew twice"):
        averager.ready("a", torch.ones(2))


def test_a_device_is_not_waited_for_if_no_gradient_is_missing() -> None:
    """The meta device has no values: whatever read one would fail."""
    made = {name: torch.zeros(3, device="meta", requires_grad=True) for name in "abc"}
    gradients: dict[str, Tensor | None] = {name: torch.ones(3, device="meta") for name in made}
    with patch.object(dist, "all_reduce", return_value=SimpleNamespace(wait=bool)):
        averager = GradientAverager(made, SimpleNamespace(size=lambda: 2), bucket_bytes=16)  # type: ignore[arg-type]
        assert all(average is not None for average in averager.finish(gradients).values())
        with pytest.raises(NotImplementedError):  # another replica may have it
            averager.finish({**gradients, "b": None})
