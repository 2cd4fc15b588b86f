"""``schedule="auto"`` runs the schedule that it says, with the numbers that this one has by name."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.layout import Layout
from lightning_parallel.parts import schedule_choice
from lightning_parallel.parts.schedule_choice import cgroup_limits, flops_per_second, memory_for_activations, share_of
from tests.pool import WorkerPool


class Net(L.LightningModule):
    """Layers in a row."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.changed(batch)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    def changed(self, x: Tensor) -> Tensor:
        return x

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Hooked(Net):
    """A full backward hook where a cut between four chunks falls, and none between two."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.layers[1].register_full_backward_hook(_nothing)


def _nothing(*args: Any) -> None:
    pass


class ChangesWhenValidated(Net):
    """Its validation step alone changes the batch in place."""

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self.training_step(batch.mul_(0.5)))


class LogsParameter(Net):
    """Logs a norm of the fifth layer's weight, which lies on another stage than the end of the step in a V."""

    def training_step(self, batch: Tensor) -> Tensor:
        self.log("norm", self.layers[4].weight.norm())
        return super().training_step(batch)


class InPlace(Net):
    def changed(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def outcome(
    schedule: str,
    stages: int,
    layers: int,
    kind: type[Net] = Net,
    *,
    validated: bool = False,
    validation: bool = True,
    slow: bool = True,
    **options: Any,
) -> tuple[dict[str, float], tuple[int, ...], str]:
    """The metrics, where chunks are, and what was said of the choice. On a ``slow`` device all that counts is what is
    computed."""
    torch.set_default_dtype(torch.float64)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # workers of the pool are quiet
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    strategy: Any = lp.PipelineStrategy(schedule=schedule, layers=["layers.*"], **options)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu", devices="auto" if stages == 1 else stages, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    loaders = [DataLoader(data.clone(), batch_size=16) for _ in range(2)]  # type: ignore[arg-type]
    module = kind(layers)
    if validated:
        trainer.validate(module, loaders[1], verbose=False)
    speed = patch("lightning_parallel.strategies.pipeline.flops_per_second", return_value=1.0)
    with speed if slow else nullcontext():
        trainer.fit(module, loaders[0], loaders[1] if validation else None)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, strategy.stage.partition.placement, " ".join(line for line in said if "'auto'" in line)


@pytest.mark.parametrize(
    ("stages", "layers", "kind", "options", "schedule", "said"),
    [
        (2, 8, Net, {}, "zbv", "stages compute 8"),
        (2, 8, Net, {"slow": False}, "1f1b", "each action takes 1 ms more."),
        (2, 3, Net, {}, "1f1b", "Not 'zbv': stages=2 with 2 chunks each, but the model has only 3 layers"),
        (2, 8, InPlace, {}, "1f1b", "Not 'zbv': training_step changes a tensor of its batch in place."),
        (2, 8, ChangesWhenValidated, {}, "1f1b", "Not 'zbv': validation_step changes a tensor of its batch in place."),
        (2, 8, LogsParameter, {}, "1f1b", "Not 'zbv': "),
        (2, 8, Net, {"balance": [2] * 4}, "zbv", "Not '1f1b': balance="),
        (2, 8, Net, {"balance": [4, 4]}, "1f1b", "Not 'interleaved': balance=[4, 4]"),
        (2, 8, Hooked, {}, "1f1b", "Not 'zbv': 'layers.1' has a full backward hook"),
        (1, 8, Net, {}, "1f1b", ""),
    ],
)
def test_the_schedule_that_is_chosen_runs(
    pool: WorkerPool, stages: int, layers: int, kind: type[Net], options: dict[str, Any], schedule: str, said: str
) -> None:
    found = pool.run(outcome, stages, "auto", stages, layers, kind, init=False, **options)
    options = {name: value for name, value in options.items() if name != "slow"}
    expected = pool.run(outcome, stages, schedule, stages, layers, kind, init=False, **options)
    assert [metrics for metrics, _, _ in found] == [metrics for metrics, _, _ in expected]
    assert [placement for _, placement, _ in found] == [placement for _, placement, _ in expected]
    (_, _, chosen), *others = found  # only one rank says it
    assert said in chosen and (f"takes {schedule!r}. By simulation with 8 microb" in chosen or stages == 1), chosen
    assert not any(text for _, _, text in others)


def test_a_validation_that_does_not_run_decides_nothing(pool: WorkerPool) -> None:
    for _, placement, _ in pool.run(outcome, 2, "auto", 2, 8, ChangesWhenValidated, init=False, validation=False):
        assert placement == (1, 0, 0, 1)


class Asks(Net):
    """Its validation asks for a value that only a later stage has, in the middle of the layers."""

    def validation_step(self, batch: Tensor) -> None:
        x = self.layers[0](batch)
        if float(self.layers[7].weight.sum()) > 100:
            x = x * 2
        self.log("val_loss", self.layers[7](x).square().mean())


def test_a_validation_that_no_schedule_allows_is_left_to_speak_for_itself(pool: WorkerPool) -> None:
    """It may not run, or on other batches."""
    failures = pool.run(outcome, 2, "auto", 2, 8, Asks, init=False, expect_errors=True)
    expected = pool.run(outcome, 2, "1f1b", 2, 8, Asks, init=False, expect_errors=True)
    last = [[failure.strip().splitlines()[-1] for failure in each] for each in (failures, expected)]
    assert last[0] == last[1] and all("layers.7" in line for line in last[0])


def test_a_module_that_has_been_validated_stays_as_it_was_cut(pool: WorkerPool) -> None:
    found = pool.run(outcome, 2, "auto", 2, 8, init=False, validated=True)
    assert [placement for _, placement, _ in found] == [(0, 1)] * 2
    assert found[0][2] == "schedule='auto' stays with '1f1b': the module has been cut for it."


def once(schedule: str) -> float:
    """A sum of parameters after one batch, from a loader that gives each batch once."""
    torch.set_default_dtype(torch.float64)
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    strategy: Any = lp.PipelineStrategy(schedule=schedule, layers=["layers.*"], microbatches=4)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = InPlace(8)
    trainer.fit(module, iter([data]))
    return float(module.layers[-1].weight.sum()) if trainer.is_global_zero else 0.0  # it has the last layer


def test_looks_leave_a_batch_that_is_put_back_as_it_was(pool: WorkerPool) -> None:
    """Each would change it once more."""
    data = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    [reference] = pool.run(alone, 1, data)
    for schedule in ("1f1b", "auto"):
        assert pool.run(once, 2, schedule, init=False)[0] == pytest.approx(reference, rel=0, abs=1e-12)


def alone(data: Tensor) -> float:
    torch.set_default_dtype(torch.float64)
    module = InPlace(8)
    optimizer = module.configure_optimizers()
    module.training_step(data.clone()).backward()
    optimizer.step()
    return float(module.layers[-1].weight.sum())


def test_a_device_s_speed_is_in_flops_per_second() -> None:
    """Between those of the slowest and of the fastest machine, not in another unit."""
    assert 1e8 < flops_per_second(torch.device("cpu")) < 1e14


def test_a_device_s_speed_is_that_of_the_products_that_nothing_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first products, and most of the others, take a time slice of another process longer."""
    now, read = 0.0, 0

    def clock() -> float:
        nonlocal now, read
        read += 1
        now += 0.001 if read % 7 == 0 else 0.021
        return now

    monkeypatch.setattr("lightning_parallel.parts.schedule_choice.time.perf_counter", clock)
    monkeypatch.setattr("lightning_parallel.parts.schedule_choice._TIMED", 1.0)
    assert flops_per_second(torch.device("cpu")) * 1.001 >= 2 * 256**3 / 0.001
    assert flops_per_second(torch.device("cpu")) <= 2 * 512**3 / 0.001 * 1.001


def test_ranks_share_a_gpu_and_the_cores_that_there_are_too_few_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert [share_of(torch.device("cpu"), ranks) for ranks in (1, 3, 6)] == [1, 1, 0.5]
    assert share_of(torch.device("cuda"), 4) == 0.25


def test_measured_times_are_of_a_forward_and_a_backward() -> None:
    """Three forwards: that is how operations are counted."""
    assert lp.PipelineStrategy(balance="time")._speed() == 3e9


def test_memory_is_what_parameters_gradients_and_moments_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    module = nn.Sequential(nn.Linear(99, 100), nn.Linear(99, 100).requires_grad_(False))
    layout = Layout.resolve(8, tensor=2, data=2, pipeline=2)
    state = 4 * 10_000 * (4 + 1)

    def left(fully_sharded: bool) -> int:
        return memory_for_activations(module, layout, torch.device("cpu"), 2, fully_sharded=fully_sharded)

    assert left(False) == int(0.8 * (2_048_000 - state // 4)) and left(True) == int(0.8 * (2_048_000 - state // 8))
    assert memory_for_activations(module, layout, torch.device("cpu"), 10**9, fully_sharded=False) == 0


@pytest.mark.parametrize(("groups", "files", "limits"), [
    ("0::/job/step", {"job/memory.max": "3000", "job/step/memory.max": "max", "memory.max": "5000"}, [3000, 5000]),
    ("4:memory:/pod\n0::/", {"memory/pod/memory.limit_in_bytes": "7000", "memory.max": "max"}, [7000]),
    ("9:cpu,cpuacct:/x\n8:hugetlb,memory:/outside", {"memory/memory.limit_in_bytes": "6000"}, [6000]),
    ("0::/elsewhere", {}, []),
])  # fmt: skip
def test_limits_of_containers_and_jobs_count(
    tmp_path: Path, groups: str, files: dict[str, str], limits: list[int]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert list(cgroup_limits(tmp_path)) == limits
    assert list(cgroup_limits(tmp_path / "nothing")) == []


def test_a_stage_may_have_what_its_container_has() -> None:
    layout = Layout.resolve(2, 0, pipeline=2)
    found = [0, 0]
    for i, limits in enumerate(([], [2**30])):
        with patch.object(schedule_choice, "cgroup_limits", return_value=limits):
            found[i] = memory_for_activations(Net(2), layout, torch.device("cpu"), 2, fully_sharded=False)
    assert 0.3 * 2**30 < found[1] < 0.4 * 2**30 < found[0]
