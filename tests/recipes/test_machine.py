"""recipes/machine.py: more processes than the machine bears, and devices that it hasn't."""

from __future__ import annotations

import pytest
import torch

from recipes import process_rules as machine
from tests.recipes.test_configs import problems


def on_a_machine(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int) -> None:
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_many_more_processes_than_cores_are_refused_unless_they_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, cores=2, gpus=0)
    assert problems("strategy=ddp", "cluster.devices=8") == []
    (problem,) = problems("strategy=ddp", "cluster.devices=100", "data.batch_size=100")
    assert str(problem).startswith("cluster.devices=100: too many processes for 2 cores")
    assert "together 24 GiB" in str(problem) and "use at most 8" in str(problem)
    assert problems("strategy=ddp", "cluster.devices=100", "data.batch_size=100", "cluster.oversubscribe=true") == []


def test_what_runs_elsewhere_or_in_one_process_is_not_measured_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, cores=2, gpus=0)
    many = ["cluster.devices=100", "data.batch_size=100"]
    assert problems("strategy=ddp", "launch=false", "strategy.process_group_backend=nccl", *many) == []
    assert problems("strategy=single", *many) == []
    assert problems("strategy=dp", *many) == []


def test_a_large_machine_may_run_more(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, cores=16, gpus=0)
    assert problems("strategy=ddp", "cluster.devices=64", "data.batch_size=64") == []
    assert problems("strategy=ddp", "cluster.devices=65", "data.batch_size=65") != []


@pytest.mark.parametrize("strategy", ["ddp", "pipeline_1f1b"])
def test_a_backend_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    def told(*overrides: str) -> str:
        return "\n".join(map(str, problems(f"strategy={strategy}", *overrides)))

    nccl = "strategy.process_group_backend=nccl"
    on_a_machine(monkeypatch, cores=2, gpus=0)
    assert told("strategy.process_group_backend=foo").endswith("give gloo or nccl, or null")
    assert told(nccl).startswith(f"{nccl}: NCCL needs a GPU for each of 2 processes; use gloo, or null")
    assert told("trainer.accelerator=gpu").startswith("trainer.accelerator=gpu: this machine has no GPU")
    on_a_machine(monkeypatch, cores=2, gpus=1)
    assert "a GPU for each of 2 processes" in told(nccl)
    assert told("trainer.accelerator=gpu") == ""  # the processes share it
    on_a_machine(monkeypatch, cores=2, gpus=2)
    assert told(nccl) == "" and "a GPU for each" in told(nccl, "trainer.accelerator=cpu")
