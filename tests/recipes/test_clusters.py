"""recipes/process_rules.py: a config and the processes that are there have to go together."""

from __future__ import annotations

import pytest

from tests.recipes.test_attempts import ENGINES, PROCESSES
from tests.recipes.test_configs import problems

TORCHRUN = "cluster=torchrun"


@pytest.fixture(autouse=True)
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four processes that torchrun has started on two machines."""
    for name in ENGINES:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(PROCESSES, ("0", "4", "0", "2", "n0", "2000"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")


def test_torchrun_s_processes_are_joined_as_they_are() -> None:
    assert problems(TORCHRUN) == []


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


def test_without_processes_or_their_variables_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT")
    (lacking,) = problems(TORCHRUN)
    assert "MASTER_PORT not in the environment" in str(lacking)
    monkeypatch.delenv("WORLD_SIZE")
    (nobody,) = problems(TORCHRUN)
    assert "nothing has started processes for it; start it with torchrun" in str(nobody)
    assert problems(TORCHRUN, "launch=false") == []


def test_one_machine_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    (problem,) = problems("cluster.nodes=2", "cluster.devices=1")
    assert str(problem).startswith("cluster.nodes=2: cluster=local is this machine alone")


def test_where_slurm_is_not_a_job_is_only_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("PATH", "/nowhere")
    (problem,) = problems("cluster=slurm")
    assert str(problem).startswith("cluster=slurm: there is no sbatch on this machine")
    assert problems("cluster=slurm", "cluster.submit=print") == []
