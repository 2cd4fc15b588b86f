"""recipes/process_rules.py: more processes than the machine bears, devices and packages that it has not; a config and
the processes that are there have to go together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes import process_rules
from tests.recipes.runs import problems
from tests.recipes.test_record import ENGINES, PROCESSES


def on_a_machine(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int) -> None:
    monkeypatch.setattr(process_rules, "cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_many_more_processes_than_cores_are_refused_unless_they_are_forced_or_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_machine(monkeypatch, cores=2, gpus=0)
    assert problems("strategy=ddp", "cluster.devices=8") == []
    many = ["cluster.devices=100", "data.batch_size=100"]
    (problem,) = problems("strategy=ddp", *many)
    assert str(problem).startswith("cluster.devices=100: too many processes for 2 cores")
    assert "together 24 GiB" in str(problem) and "use at most 8" in str(problem)
    assert problems("strategy=ddp", *many, "cluster.oversubscribe=true") == []
    assert problems("strategy=ddp", "launch=false", "strategy.process_group_backend=nccl", *many) == []
    assert problems("strategy=single", *many) == []
    assert problems("strategy=data_parallel", *many) == []


def test_a_backend_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*overrides: str) -> str:
        return "\n".join(map(str, problems("strategy=ddp", *overrides)))

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


@pytest.mark.parametrize(("overrides", "missing", "extra"), [
    (["model=hf", "model.path={folder}", "data=hf", "data.path={file}"], "transformers and safetensors", "hf"),
    (["model=hf", "model.path={folder}", "model.lora={{r: 2}}", "data=stdlib"], "peft", "hf"),
    (["model=timm", "data=images", "data.path={folder}"], "timm and torchvision", "images"),
    (["model=hf", "model.path={folder}", "data=hf", "data.path={file}"], "datasets", "hf"),
    (["model=lenet", "data=images", "data.path={folder}"], "pillow", "images"),
    (["logger=wandb"], "wandb", "wandb"),
    (["logger=mlflow"], "mlflow-skinny", "mlflow"),
])  # fmt: skip
def test_a_package_that_is_missing_is_named_with_its_extra(
    overrides: list[str], missing: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"mlflow": "mlflow-skinny", "PIL": "pillow"}
    there = lambda module: None if modules.get(module, module) in missing.split(" and ") else object()  # noqa: E731
    monkeypatch.setattr(process_rules, "find_spec", there)
    given = [each.format(folder=tmp_path, file=tmp_path / "data.jsonl") for each in overrides]
    (found,) = (p for p in problems("strategy=single", *given) if "not installed" in p.message)
    assert found.message == f"{missing} not installed" and found.fix == f'pip install ".[recipes,{extra}]"'


TORCHRUN = "cluster=torchrun"


# -- processes that are there ---------------------------------------------------------------------------------------


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four processes that torchrun has started on two machines."""
    for name in ENGINES:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(PROCESSES, ("0", "4", "0", "2", "n0", "2000"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(("overrides", "said"), [
    ([], "this is one of 4 processes that have been started, and each would start workers; use cluster=torchrun"),
    ([TORCHRUN, "cluster.devices=1"], "cluster.devices=1 is for 2 processes, but 4 have been started"),
    ([TORCHRUN, "strategy=single"], "cluster.nodes=2 x cluster.devices=2 is for 1 processes, but 4 have been started"),
    ([TORCHRUN, "data.batch_size=6", "strategy=ddp"], "can't be shared equally by cluster.nodes=2 x cluster.devices=2"),
    ([TORCHRUN, "strategy.stages=3"], "set 3 processes, or a multiple of it"),
    ([TORCHRUN, "strategy=tensor_parallel", "strategy.tensor_parallel=2", "strategy.data_parallel=1"],
     "does not fill cluster.nodes=2 x cluster.devices=2; set cluster.devices=1"),
])  # fmt: skip
def test_others_are_refused(overrides: list[str], said: str) -> None:
    (problem,) = problems(*overrides)
    assert said in str(problem)


@pytest.mark.usefixtures("four")
def test_processes_are_joined_as_they_are_and_where_there_are_none_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert problems(TORCHRUN) == []
    monkeypatch.delenv("MASTER_PORT")
    (lacking,) = problems(TORCHRUN)
    assert "MASTER_PORT not in the environment" in str(lacking)
    monkeypatch.delenv("WORLD_SIZE")
    (nobody,) = problems(TORCHRUN)
    assert "nothing has started processes for it; start it with torchrun" in str(nobody)
    assert problems(TORCHRUN, "launch=false") == []

    (problem,) = problems("cluster.nodes=2", "cluster.devices=1")
    assert str(problem).startswith("cluster.nodes=2: cluster=local is this machine alone")
    monkeypatch.setenv("PATH", "/nowhere")
    (problem,) = problems("cluster=slurm")
    assert str(problem).startswith("cluster=slurm: there is no sbatch on this machine")
    assert problems("cluster=slurm", "cluster.submit=print") == []
