"""recipes/rerun.py: a run is repeated from its record, and what differs is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import launch, record, rerun
from recipes.problem import ConfigError
from tests.recipes.test_configs import composed
from tests.recipes.test_launch import TINY

METRICS = {"val_loss": 0.5, "train_loss": 1.0}


class Recorded:
    """A launcher that trains nothing."""

    def launch(self, config_file: Path, processes: int) -> None:
        folder = config_file.parent
        record.update(folder, data="abc", steps=2, metrics=record.write_metrics(folder, METRICS))
        record.end(folder, "completed")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run."""
    monkeypatch.setattr("recipes.build.launcher", lambda config: Recorded())
    folder = tmp_path / "run"
    folder.mkdir()
    config = composed("strategy=single", "ckpt_path=last", *TINY)
    config["paths"]["output_dir"] = str(folder)
    config["callbacks"]["checkpoint"]["dirpath"] = f"{folder}/checkpoints"
    launch.write(config)
    launch.launch(config, {"model": "mlp"}, ["model=mlp"])
    return folder


def change(folder: Path, **fields: Any) -> None:
    content = record.read(folder)
    (folder / record.RUN).write_text(json.dumps({**content, **fields}))


def test_a_run_is_repeated_beside_itself(run: Path) -> None:
    assert rerun.rerun(run) == []
    assert rerun.rerun(run) == []
    first, second = (run.with_name(f"run-again-{number}") for number in (1, 2))
    for new in (first, second):
        config = yaml.safe_load((new / record.CONFIG).read_text())
        assert config["paths"]["output_dir"] == str(new) and config["ckpt_path"] is None
        assert config["callbacks"]["checkpoint"]["dirpath"] == f"{new}/checkpoints"
        said = record.read(new)
        assert (said["status"], said["choices"], said["overrides"]) == ("completed", {"model": "mlp"}, ["model=mlp"])


def test_what_differs_is_told(run: Path) -> None:
    versions = record.read(run)["versions"]
    change(run, versions={**versions, "torch": "1.0"}, git=None, data="other", metrics={**METRICS, "val_loss": 0.4})
    code, git, data, metrics = rerun.rerun(run)
    assert code == f"versions.torch: 1.0 then, {versions['torch']} now" and git.startswith("git: None then")
    assert data == "data: other then, abc now" and metrics == "metrics.val_loss: 0.4 then, 0.5 now"


def test_paths_are_moved_as_wholes() -> None:
    config = {"a": ["/x/1", "/x/1/b", "/x/10/c", 3], "b": {"c": "/x/é 'q'", "d": None}}
    assert record._moved(config, "/x/1", "/new") == {**config, "a": ["/new", "/new/b", "/x/10/c", 3]}
    assert record._moved(config, "/x/é 'q'", "/new")["b"] == {"c": "/new", "d": None}


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of a run"):
        rerun.rerun(tmp_path)
    with pytest.raises(SystemExit, match="is no folder of a run"):
        rerun.main([str(tmp_path)])
