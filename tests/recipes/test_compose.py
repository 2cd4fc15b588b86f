"""recipes/compose.py: a command line is checked as a whole before its first job starts."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf

from recipes.compose import check, started_several_times
from tests.recipes.test_configs import NOWHERE, composed


def told(*overrides: str, multirun: bool = False) -> list[str]:
    return [str(problem) for problem in check(overrides, multirun=multirun)]


def test_unknown_options_and_keys_are_told_together_with_what_there_is() -> None:
    option, top, key = told("strategy=pipelin_zbv", "modle=gpt", "trainer.max_stepz=3")
    assert option.startswith("strategy=pipelin_zbv: no such strategy; did you mean pipeline_zbv? known: d")
    assert top.startswith("modle=gpt: no such key; did you mean model?")
    assert key.startswith("trainer.max_stepz=3: no such key in trainer; did you mean max_steps? known: ")


def test_keys_are_looked_up_in_the_chosen_option() -> None:
    assert told("strategy=pipeline_gpipe", "strategy.schedule=1f1b") == []
    (problem,) = told("strategy=pipeline_async", "strategy.chunks=2")
    assert "no such key in strategy" in problem
    assert told("logger.csv.name=x", "hydra.job.name=y", "+callbacks.x._target_=lightning.Callback") == []


def test_every_job_of_a_sweep_is_checked_before_the_first() -> None:
    (problem,) = told("strategy=single,ddp", "cluster.devices=5", multirun=True)
    assert problem.startswith("data.batch_size=24: can't be shared equally by cluster.devices=5")
    (problem,) = told("strategy=ddp,sngle", "cluster.devices=5", multirun=True)
    assert problem.startswith("strategy=sngle: no such strategy; did you mean single?")


def test_a_launcher_that_starts_a_job_several_times_is_refused() -> None:
    (problem,) = started_several_times(OmegaConf.create({"nodes": 2, "tasks_per_node": 1}))
    assert str(problem).startswith("hydra.launcher.nodes=2: each would run the whole recipe")
    assert list(started_several_times(OmegaConf.create({"n_jobs": 2}))) == []


def test_the_resolved_config_is_plain_and_has_absolute_paths() -> None:
    config = composed("paths.data_dir=somewhere")
    assert type(config["optimizer"]["betas"]) is list
    assert config["data"]["directory"] == str(Path("somewhere").absolute())
    assert config["callbacks"]["checkpoint"]["dirpath"] == f"{NOWHERE}/checkpoints"


def test_a_group_without_an_option_is_refused() -> None:
    assert "data=null: no such data" in str(check(["data=null"])[0])


def test_the_newest_checkpoint_is_looked_for_in_the_folder_of_the_run(tmp_path: Path) -> None:
    again = ["ckpt_path=last", f"hydra.run.dir={tmp_path}"]
    assert "there is no checkpoint in" in str(check(again)[0])
    (tmp_path / "checkpoints").mkdir()
    torch.save({}, tmp_path / "checkpoints" / "last.ckpt")
    assert check(again) == []
    assert check(["ckpt_path=last"], multirun=True) == []  # the folder of a job is known when it starts
