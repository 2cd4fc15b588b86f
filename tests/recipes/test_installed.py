"""The wheel: the recipes as commands with modules and configs of the user's own."""

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
import yaml
from hydra._internal.utils import get_args_parser

from recipes import CONF, ROOT, build, installed, record
from recipes.compose import check, resolved
from recipes.configs import Configs
from tests.thorough import thorough

PAGE = (ROOT / "docs" / "quickstart.md").read_text().split("## Outside the checkout")[1].split("\n## ")[0]
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^lp-.*$", PAGE, re.MULTILINE)]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
QUIET = ["print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]


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
