"""recipes/compose.py, configs.py: a command line is checked as a whole before its first job starts, and configs in a
folder of the user's own like those of the recipes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from recipes import CONF, ROOT, build, commands, installed, launch, record
from recipes.compose import check, resolved, started_several_times
from recipes.configs import Configs
from recipes.problem import ConfigError
from recipes.validate import validate
from tests.recipes.runs import NOWHERE, QUIET, composed
from tests.thorough import thorough

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


def test_every_job_of_a_sweep_is_checked_before_the_first_and_is_started_once() -> None:
    (problem,) = told("strategy=single,ddp", "cluster.devices=5", multirun=True)
    assert problem.startswith("data.batch_size=24: can't be shared equally by cluster.devices=5")
    (problem,) = told("strategy=ddp,sngle", "cluster.devices=5", multirun=True)
    assert problem.startswith("strategy=sngle: no such strategy; did you mean single?")
    (several,) = started_several_times(OmegaConf.create({"nodes": 2, "tasks_per_node": 1}))
    assert str(several).startswith("hydra.launcher.nodes=2: each would run the whole recipe")
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


# -- the wheel: the recipes as commands --------------------------------------------------------------------------------


PAGE = (ROOT / "docs" / "quickstart.md").read_text().split("## Outside the checkout")[1].split("\n## ")[0]
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^lp-.*$", PAGE, re.MULTILINE)]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed, without what it depends on, which is installed here."""
    copy, lib = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("lib")
    for name in ("lightning_parallel", "recipes", "hydra_plugins", "pyproject.toml", "README.md", "LICENSE"):
        os.symlink(ROOT / name, copy / name)
    pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(lib), "."]
    subprocess.run([sys.executable, *pip], cwd=copy, check=True, capture_output=True)
    return lib


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page."""
    unpack(PAGE, "experiment", tmp_path, monkeypatch)
    return tmp_path


def unpack(page: str, group: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a page's module, and its config of a group, into a folder, which becomes the current one."""
    (module,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folder / "my_package.py").write_text(module)
    (folder / "my_conf" / group).mkdir(parents=True)
    (folder / "my_conf" / group / "mine.yaml").write_text(config)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)


@pytest.mark.programs
def test_the_wheel_has_all_configs_and_plugins(lib: Path) -> None:
    def configs(folder: Path) -> dict[Path, str]:
        return {file.relative_to(folder): file.read_text() for file in folder.rglob("*.yaml")}

    assert configs(lib / "recipes" / "conf") == configs(CONF) and len(configs(CONF)) > 40
    assert (lib / "lightning_parallel" / "py.typed").exists()
    for package in ("hydra_plugins", "recipes", "lightning_parallel"):
        modules = {file.relative_to(ROOT) for file in (ROOT / package).rglob("*.py")}
        assert modules == {file.relative_to(lib) for file in (lib / package).rglob("*.py")}


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_command_tells_its_own_name(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{script}", "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert SCRIPTS[script] == "recipes.installed:main"
    with pytest.raises(SystemExit) as ended:
        installed.main()
    told = capsys.readouterr().out
    assert not ended.value.code and f"{script} [" in told and "python -m" not in told


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name == "psutil" else name)
    with pytest.raises(SystemExit, match=r'psutil not installed: pip install "\.\[recipes\]" in the checkout'):
        installed.main()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_are_right(here: Path, command: str) -> None:
    script, *words = shlex.split(command)
    assert script == "lp-train"
    args = get_args_parser().parse_args(words)
    assert args.help or check(args.overrides, configs=Configs.of_command_line(args)) == []


def test_a_template_s_module_and_config_come_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "moving.md").read_text()
    unpack(page, "model", tmp_path, monkeypatch)
    commands = re.findall(r"^lp-train (.*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        args = get_args_parser().parse_args(shlex.split(command))
        configs = Configs.of_command_line(args)
        assert check(args.overrides, configs=configs) == []
        with configs.opened():
            made: Any = build.model(resolved(configs.composed(args.overrides), str(tmp_path))).configure_optimizers()
    assert made["optimizer"].param_groups[0]["lr"] == 0.01 and made["lr_scheduler"].step_size == 10


@pytest.mark.programs
@pytest.mark.parametrize("launch", [False, *thorough(True)])
def test_a_module_and_configs_of_the_users_own_are_found_from_an_empty_folder(
    lib: Path, here: Path, launch: bool
) -> None:
    """Where nothing is launched, the config is written for a worker that is started by hand."""
    (here / "recipes").mkdir()
    (here / "recipes" / "__init__.py").write_text("raise RuntimeError('a package of the name of ours')")
    program = [sys.executable, lib / "bin" / "lp-train", "--config-dir", "my_conf", "experiment=mine"]
    few = ["strategy=single", "trainer.max_steps=2", "trainer.limit_val_batches=1", "hydra.run.dir=logs/run", *QUIET]
    variables = {**os.environ, "PYTHONPATH": str(lib)}
    few += [] if launch else ["launch=false"]
    done = subprocess.run([*program, *few], cwd=here, env=variables, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    left = {file.name for file in here.iterdir()} - {"__pycache__"}
    assert left == {"logs", "my_conf", "my_package.py", "recipes"}
    if not launch:
        written = yaml.safe_load((here / "logs" / "run" / record.CONFIG).read_text())
        assert written["model"]["_target_"].startswith("my_package.") and written["trainer"]["max_steps"] == 2
        return
    said = json.loads((here / "logs" / "run" / record.RUN).read_text())
    assert (said["status"], said["steps"]) == ("completed", 2)
    assert said["configs"] == {"main": None, "name": "train", "own": [f"file://{here}/my_conf"]}
    assert said["git"] is None  # neither of the checkout, from which nothing was taken
