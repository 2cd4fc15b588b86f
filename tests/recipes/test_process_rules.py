"""recipes/process_rules.py: more processes than the machine bears, devices and packages that it has not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes import process_rules
from tests.recipes.test_configs import problems
from tests.thorough import thorough


def on_a_machine(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int) -> None:
    monkeypatch.setattr(process_rules, "cores", lambda: cores)
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
    assert problems("strategy=data_parallel", *many) == []


@pytest.mark.parametrize("strategy", ["ddp", *thorough("pipeline_1f1b")])
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


@pytest.mark.parametrize(
    ("overrides", "missing", "extra"),
    [
        (["model=hf", "model.path={folder}", "data=hf", "data.path={file}"], "transformers and safetensors", "hf"),
        (["model=hf", "model.path={folder}", "model.lora={{r: 2}}", "data=stdlib"], "peft", "hf"),
        (["model=timm", "data=images", "data.path={folder}"], "timm and torchvision", "images"),
        (["model=hf", "model.path={folder}", "data=hf", "data.path={file}"], "datasets", "hf"),
        (["model=lenet", "data=images", "data.path={folder}"], "pillow", "images"),
        (["logger=wandb"], "wandb", "wandb"),
        (["logger=mlflow"], "mlflow-skinny", "mlflow"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    overrides: list[str], missing: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"mlflow": "mlflow-skinny", "PIL": "pillow"}
    there = lambda module: None if modules.get(module, module) in missing.split(" and ") else object()  # noqa: E731
    monkeypatch.setattr(process_rules, "find_spec", there)
    given = [each.format(folder=tmp_path, file=tmp_path / "data.jsonl") for each in overrides]
    (found,) = (p for p in problems("strategy=single", *given) if "not installed" in p.message)
    assert found.message == f"{missing} not installed" and found.fix == f'pip install ".[recipes,{extra}]"'


def test_a_broken_value_of_one_group_hides_no_package_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_rules, "find_spec", lambda module: None)
    told = [str(p) for p in problems("strategy=single", "model=hf", "model.lora=3", "data=stdlib", "logger=wandb")]
    assert any("model.lora=3" in each for each in told) and any("wandb not installed" in each for each in told)
