"""recipes/worker.py, process_rules.py: a process of a run tells how it ended, and doesn't outlive its launcher. More
processes than the machine bears, devices and packages that it has not, and processes that don't go with the config."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from lightning_parallel.ranks.collectives import PeerLostError
from recipes import process_rules, record, work, worker
from recipes.processes import LAUNCHED, ON_GPUS
from tests.recipes.runs import composed, problems, refused
from tests.recipes.test_local import TINY
from tests.recipes.test_record import ENGINES, PROCESSES
from tools.workers.pool import Failure, WorkerPool


def resolved(folder: Path, strategy: str) -> Path:
    """A resolved config whose run nobody has started to record, as under torchrun."""
    words = [f"strategy={strategy}", "callbacks=none", "logger=none", "test=true", *TINY]
    config = composed(*words, folder=folder / "run")
    file = folder / record.CONFIG
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return resolved(tmp_path, "single")


def recorded(config_file: Path) -> dict[str, Any]:
    content = json.loads((config_file.parent / "run" / record.RUN).read_text())
    assert isinstance(content, dict)
    return content


# -- its launcher --------------------------------------------------------------------------------------------


def forked(function: Callable[[], None]) -> int:
    """Run it in a process of its own; the process."""
    process = os.fork()
    if process:
        return process
    try:
        function()
    finally:
        os._exit(0)


def outlive_launcher(killed: bool) -> bool:
    """Did a worker go on after its launcher, here a process that forks it, had ended?"""
    alive, report = os.pipe()

    def work() -> None:
        worker.end_with_the_launcher()
        os.write(report, b"started")
        time.sleep(10)
        os.write(report, b", went on")

    def launch() -> None:
        os.environ[LAUNCHED] = str(os.getpid())
        forked(work)
        os.read(alive, len(b"started"))  # until the worker has asked to end with this process
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(launch), 0)
    os.close(report)
    return os.read(alive, 100) != b""  # the end of the pipe is where nobody can write any more


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
def test_a_worker_ends_with_its_launcher(pool: WorkerPool, killed: bool) -> None:
    assert pool.run(outlive_launcher, 1, killed, init=False) == [False]


def variables_of_a_worker(own: str) -> dict[str, str]:
    """Those for GPUs when its work begins, where CUDA_DEVICE_MAX_CONNECTIONS was set."""
    seen: dict[str, str] = {}
    for name in ON_GPUS:
        os.environ.pop(name, None)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = own
    with patch.object(work, "main", lambda config: seen.update(os.environ)):
        worker.start("seed: 1")
    return {name: seen[name] for name in ON_GPUS}


def test_what_gpus_need_is_set_before_the_work_begins_unless_the_user_has_set_it(pool: WorkerPool) -> None:
    assert pool.run(variables_of_a_worker, 1, "8", init=False) == [{**ON_GPUS, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}]


# -- run.json ------------------------------------------------------------------------------------------------


def test_under_torchrun_a_run_is_recorded_from_its_start_to_its_end(pool: WorkerPool, config_file: Path) -> None:
    pool.run(work.main, 1, config_file.read_text(), init=False)
    run = recorded(config_file)
    assert (run["status"], run["error"], run["steps"], run["choices"]) == ("completed", None, 2, {})
    (rank,) = run["layout"]["ranks"]
    assert rank["rank"] == 0 and rank["coordinates"] == {"data": 0, "tensor": 0, "pipeline": 0}
    assert rank["device"] == "cpu" and rank["host"]
    assert {"python", "torch", "lightning"} <= set(run["versions"]) and run["seed"] == 1
    assert run["metrics"] == record.read_metrics(config_file.parent / "run")
    assert {"train_loss", "val_loss", "val_acc", "test_loss", "test_acc"} <= run["metrics"].keys()


def end_with(error: BaseException, config_file: str, rank: str = "0") -> None:
    os.environ["RANK"] = rank
    with patch.object(work, "run", side_effect=error):
        work.main(Path(config_file).read_text())


@pytest.mark.parametrize(("error", "status"), [
    (ValueError("no luck today"), "failed"),
    (KeyboardInterrupt("enough"), "interrupted"),
], ids=["failed", "interrupted"])  # fmt: skip
def test_a_run_that_does_not_end_well_says_why_and_raises(
    pool: WorkerPool, config_file: Path, error: BaseException, status: str
) -> None:
    (failure,) = pool.run(end_with, 1, error, str(config_file), init=False, expect_errors=True)
    message = f"{type(error).__name__}: {error}"
    assert isinstance(failure, Failure) and message in failure
    run = recorded(config_file)
    assert run["status"] == status and run["ended"] is not None
    assert (run["error"]["rank"], run["error"]["message"]) == (0, message)
    assert message in run["error"]["traceback"]
    kept = config_file.parent / "run" / record.ERRORS / "rank-0.txt"
    assert kept.exists() == (status == "failed") and (status != "failed" or message in kept.read_text())


def lose_a_peer(launched: bool) -> str | int | None:
    os.environ.pop(LAUNCHED, None)
    if launched:
        os.environ[LAUNCHED] = str(os.getppid())
    with patch.object(work, "main", side_effect=PeerLostError("A collective broke.")):
        with pytest.raises(SystemExit) as left:
            worker.start("seed: 1")
    return left.value.code


def test_under_torchrun_a_rank_that_lost_its_peer_says_so_in_a_line(pool: WorkerPool) -> None:
    assert pool.run(lose_a_peer, 1, False, init=False) == ["rank 0: A collective broke."]
    assert pool.run(lose_a_peer, 1, True, init=False) == [1]  # the launcher tells the cause


def test_only_the_first_rank_records(pool: WorkerPool, config_file: Path) -> None:
    (failure,) = pool.run(end_with, 1, ValueError("a peer's"), str(config_file), "1", init=False, expect_errors=True)
    assert isinstance(failure, Failure) and "a peer's" in failure
    assert [file.name for file in (config_file.parent / "run").rglob("*.*")] == ["rank-1.txt"]


def start_too_many(config_file: str, there: str) -> str:
    os.environ["WORLD_SIZE"] = there
    with pytest.raises(SystemExit) as refused:
        work.main(Path(config_file).read_text())
    return str(refused.value.code)


def test_another_number_of_processes_than_the_config_s_is_refused_on_every_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    file = resolved(tmp_path, "pipeline_1f1b")
    told = pool.run(start_too_many, 3, str(file), "3", init=False)
    assert len(set(told)) == 1 and "\n" not in told[0]
    assert told[0].startswith("3 processes started, but the config is for 2 (cluster.devices=2): use torchrun --nproc-")
    (told_alone,) = pool.run(start_too_many, 1, str(file), "1", init=False)
    assert told_alone.startswith("1 process started, but the config is for 2")
    assert not (tmp_path / "run").exists()


# -- rules -----------------------------------------------------------------------------------------------------------


def on_a_machine(monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int) -> None:
    monkeypatch.setattr(process_rules, "cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_many_more_processes_than_cores_are_refused_unless_they_are_forced_or_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_machine(monkeypatch, cores=2, gpus=0)
    assert problems("strategy=ddp", "cluster.devices=8") == []
    many = ["cluster.devices=100", "data.batch_size=100"]
    told = refused("strategy=ddp", *many)
    assert told.startswith("cluster.devices=100: too many processes for 2 cores")
    assert "together 24 GiB" in told and "use at most 8" in told
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
    assert said in refused(*overrides)


@pytest.mark.usefixtures("four")
def test_processes_are_joined_as_they_are_and_where_there_are_none_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert problems(TORCHRUN) == []
    monkeypatch.delenv("MASTER_PORT")
    assert "MASTER_PORT not in the environment" in refused(TORCHRUN)
    monkeypatch.delenv("WORLD_SIZE")
    assert "nothing has started processes for it; start it with torchrun" in refused(TORCHRUN)
    assert problems(TORCHRUN, "launch=false") == []
    lone = refused("cluster.nodes=2", "cluster.devices=1")
    assert lone.startswith("cluster.nodes=2: cluster=local is this machine alone")
    monkeypatch.setenv("PATH", "/nowhere")
    assert refused("cluster=slurm").startswith("cluster=slurm: there is no sbatch on this machine")
    assert problems("cluster=slurm", "cluster.submit=print") == []
