"""recipes/compose.py, configs.py: a command line is checked as a whole before its first job starts, and configs in a
folder of the user's own like those of the recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from recipes import CONF, commands, launch, record
from recipes.compose import check, started_several_times
from recipes.configs import Configs
from recipes.problem import ConfigError
from recipes.validate import validate
from tests.recipes.runs import NOWHERE, composed

EXPERIMENT = """\
# @package _global_
defaults:
  - override /model: wide
  - override /data: digits
  - override /strategy: pipeline_1f1b
trainer:
  max_steps: 7
"""
WIDE = "defaults:\n  - mlp\nwidth: 96\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, seen from where commands are started."""
    monkeypatch.chdir(tmp_path)
    write("experiment/mine", EXPERIMENT)
    write("experiment/team/theirs", EXPERIMENT)
    write("model/wide", WIDE)
    return tmp_path / "my_conf"


def write(option: str, text: str) -> None:
    file = Path("my_conf", f"{option}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def told(*words: str, multirun: bool = False) -> list[str]:
    """The problems of a command line with Hydra's own arguments."""
    args = get_args_parser().parse_args(words)
    return [str(each) for each in check(args.overrides, multirun=multirun, configs=Configs.of_command_line(args))]


OWN = ("--config-dir", "my_conf")


def test_the_users_options_are_known_and_named_where_one_is_misspelt(folder: Path) -> None:
    assert told(*OWN, "experiment=mine") == told(*OWN, "experiment=team/theirs") == []
    (problem,) = told(*OWN, "experiment=mien", "model.widht=3")
    assert problem.startswith("experiment=mien: no such experiment; did you mean mine? known: async_quality, ")
    (problem,) = told(*OWN, "experiment=mine", "model.widht=3")
    assert problem.startswith("model.widht=3: no such key in model; did you mean width?")


@pytest.mark.parametrize(("right", "wrong", "said"), [
    ("wide", "wied", "model=wied: no such model, named in {folder}/experiment/mine.yaml; did you mean wide?"),
    ("max_steps", "max_stepz", "trainer.max_stepz=7: no such key in trainer; did you mean max_steps?"),
    (": 7", ": seven", "trainer.max_steps=seven: not a value it can have; give an integer"),
    ("# @package _global_\n", "", "experiment=mine: {folder}/experiment/mine.yaml would set values in a node expe"),
    ("trainer:", "[trainer:", "not YAML: "),
])  # fmt: skip
def test_what_is_wrong_in_the_users_file_is_told(folder: Path, right: str, wrong: str, said: str) -> None:
    write("experiment/mine", EXPERIMENT.replace(right, wrong))
    (problem,) = told(*OWN, "experiment=mine")
    assert problem.startswith(said.format(folder=folder))


def test_a_file_of_the_users_that_is_not_read_is_told(folder: Path) -> None:
    write("model/gpt", (CONF / "model" / "gpt.yaml").read_text())
    assert told(*OWN, "model=gpt") == []  # it is the same
    write("model/gpt", "name: gpt\n")
    (problem,) = told(*OWN, "model=mlp")
    assert problem.startswith(f"--config-dir={folder}: {folder}/model/gpt.yaml is not read, but the one of the recipes")


def test_a_config_of_the_users_in_place_of_train_is_checked(folder: Path) -> None:
    more = folder.with_name("more")
    (more / "trainer").mkdir(parents=True)
    (more / "trainer" / "long.yaml").write_text("defaults:\n  - default\nmax_steps: 9\n")
    search = f"hydra:\n  searchpath:\n    - file://{more}\n"
    write("whole", "defaults:\n  - train\n  - override /model: wide\n  - override /data: digits\n  - _self_\n" + search)
    assert told(*OWN, "--config-name", "whole", "trainer=long") == []
    (problem,) = told(*OWN, "--config-name", "whole", "trainer=lnog")
    assert problem.startswith("trainer=lnog: no such trainer; did you mean long?")
    for words, said in ((["--config-name", "whoel"], "did you mean whole?"), (["--config-dir", "x"], "no such folder")):
        with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
            told(*OWN, *words)


def test_the_search_path_of_the_command_line_is_known(folder: Path) -> None:
    assert told(f"hydra.searchpath=[file://{folder}]", "experiment=mine") == []
    assert told("hydra.searchpath=[my_conf]", "experiment=mine") == []
    with pytest.raises(ConfigError, match="hydra.searchpath: there is no folder .*my_cnof"):
        told("hydra.searchpath=[my_cnof]", "experiment=mine")
    assert told("hydra.searchpath=[pkg://lightning_parallel]", "model=mlp", "data=digits") == []


def test_a_command_after_a_run_knows_the_runs_configs(folder: Path, tmp_path: Path) -> None:
    configs = Configs(own=(f"file://{folder}",))
    run, words = tmp_path / "run", ["experiment=mine"]
    run.mkdir()
    config = {**composed("model=mlp", "data=digits", folder=run), "callbacks": {}}
    launch.write(config)
    record.start(run, config, {}, words, configs.recorded)
    checkpoint = tmp_path / "weights.safetensors"
    checkpoint.touch()

    def changed(*overrides: str) -> dict[str, Any]:
        return commands.config_of("evaluate", run, tmp_path / "out", overrides, checkpoint)

    assert changed("model.width=32")["model"] == {**config["model"], "width": 32}
    told = " ".join(map(str, validate(changed("model.widht=3"))))
    assert "model.widht=3: no such key in model; did you mean width?" in told
    folder.rename(tmp_path / "elsewhere")
    assert changed()["model"] == config["model"]
    with pytest.raises(ConfigError, match="my_conf: the run's own configs were there; put them back, or leave the"):
        changed("model.width=32")


def test_unknown_options_and_keys_are_told_together_with_what_there_is() -> None:
    option, top, key = told("strategy=pipelin_zbv", "modle=gpt", "trainer.max_stepz=3")
    assert option.startswith("strategy=pipelin_zbv: no such strategy; did you mean pipeline_zbv? known: d")
    assert top.startswith("modle=gpt: no such key; did you mean model?")
    assert "data=null: no such data" in str(check(["data=null"])[0])
    assert key.startswith("trainer.max_stepz=3: no such key in trainer; did you mean max_steps? known: ")
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


def test_the_newest_checkpoint_is_looked_for_in_the_folder_of_the_run(tmp_path: Path) -> None:
    again = ["ckpt_path=last", f"hydra.run.dir={tmp_path}"]
    assert "there is no checkpoint in" in str(check(again)[0])
    (tmp_path / "checkpoints").mkdir()
    torch.save({}, tmp_path / "checkpoints" / "last.ckpt")
    assert check(again) == []
    assert check(["ckpt_path=last"], multirun=True) == []  # the folder of a job is known when it starts
