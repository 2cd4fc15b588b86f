"""On a GPU: the same numbers, whether stages share one over gloo and pinned host memory, or have one each over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.strategies.harness import Report, joined, largest_difference, train
from tools.workers.pool import WorkerPool

STAGES = 3


def train_on(devices: list[str], model: str, strategy: str, options: dict[str, Any], **trainer_options: Any) -> Report:
    """As `train`, each rank on the device that the list names for it."""
    parallel = [torch.device(device) for device in devices]
    options = {**options, "parallel_devices": parallel}
    report = train(model, strategy, options, accelerator="auto", devices="auto", **trainer_options)
    cpu = torch.device("cpu")
    report.weights = {name: tensor.to(cpu) for name, tensor in report.weights.items()}
    report.gradients = [{n: g.to(cpu) for n, g in gradients.items()} for gradients in report.gradients]
    return report


def assert_same_run(
    pool: WorkerPool, devices: list[str], model: str, tolerance: float, schedules: Sequence[str] = ("gpipe", "1f1b")
) -> None:
    reference = pool.run(train, 1, model, init=False)[0]
    for schedule in schedules:
        options = {"schedule": schedule, "microbatches": 4}
        reports = pool.run(train_on, len(devices), devices, model, "sync", options, init=False)
        assert reports[0].losses == pytest.approx(reference.losses, rel=0, abs=tolerance)
        for update, expected in enumerate(reference.gradients):
            assert largest_difference(joined(reports, "gradients", update), expected) < tolerance
        assert largest_difference(joined(reports, "weights"), reference.weights) < tolerance


def test_ranks_run_on_the_devices_that_they_are_given(pool: WorkerPool) -> None:
    assert_same_run(pool, ["cpu"] * STAGES, "LeNet", 1e-12, ["1f1b"])


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["GPT2", "Llama", "Blocks", "LeNet", "DemoTransformer"])
def test_stages_sharing_a_gpu_train_as_one_process(pool: WorkerPool, model: str) -> None:
    assert_same_run(pool, ["cuda:0"] * STAGES, model, 1e-10)


@pytest.mark.gpu
def test_asynchronous_stages_sharing_a_gpu_train_as_on_the_cpu(pool: WorkerPool) -> None:
    weights = [
        joined(pool.run(train_on, STAGES, [device] * STAGES, "Llama", "async", {}, init=False), "weights")
        for device in ("cpu", "cuda:0")
    ]
    assert largest_difference(*weights) < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_on_a_gpu_is_near_float32(pool: WorkerPool, precision: str) -> None:
    options = {"microbatches": 2}
    runs = [
        pool.run(
            train_on, 2, ["cuda:0"] * 2, "Llama", "sync", options, init=False, precision=each, dtype=torch.float32
        )[0]
        for each in ("32-true", precision)
    ]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=0.02)


@pytest.mark.gpu(2)  # on one, stages share it: the tests above
def test_a_gpu_each_over_nccl_trains_as_one_process(pool: WorkerPool) -> None:
    stages = min(torch.cuda.device_count(), 4)
    assert_same_run(pool, [f"cuda:{i}" for i in range(stages)], "GPT2", 1e-10)
