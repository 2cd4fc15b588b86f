"""recipes/report.py: the runs of a sweep side by side, at its end or at any time."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from recipes import record, report

START = "2026-01-01T00:00:00.000+00:00"


def write(folder: Path, lr: str, **said: Any) -> None:
    folder.mkdir(parents=True)
    overrides = ["model=mlp", f"optimizer.lr={lr}", "+tags=[a]"]
    content = {"status": "completed", "started": START, "ended": None, "overrides": overrides, "attempts": [{}]}
    (folder / record.RUN).write_text(json.dumps({**content, **said}))
    (folder / record.CONFIG).write_text(yaml.safe_dump({"optimized_metric": "val_loss"}))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write(tmp_path / "2", "0.1", metrics={"val_loss": 0.5}, ended="2026-01-01T00:01:30.000+00:00")
    write(tmp_path / "10", "0.2", metrics={"val_loss": 0.25, "val_acc": 1.0}, attempts=[{}, {}])
    write(tmp_path / "11", "0.3", status="starting", overrides=None)
    (tmp_path / "12").mkdir()
    return tmp_path


def test_runs_are_in_order_with_what_differs(sweep: Path) -> None:
    said = io.StringIO()
    first, second, third = report.report(sweep, Console(file=said, width=200))
    numbers = {"status": "completed", "val_loss": 0.5, "seconds": 90, "attempts": 1}
    assert first == {"run": "2", "model": "mlp", "optimizer.lr": "0.1", "tags": "[a]", **numbers}  # the third has none
    assert (second["run"], second["seconds"], second["attempts"]) == ("10", None, 2)
    assert (third["run"], third["status"]) == ("11", "starting") and "val_loss" not in third
    with (sweep / report.CSV).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["val_loss"] for row in rows] == ["0.5", "0.25", ""] and rows[1]["val_acc"] == "1.0"
    assert "0.25" in said.getvalue()


def test_what_all_runs_share_is_left_out(sweep: Path) -> None:
    (sweep / "11" / record.RUN).unlink()
    first, _ = report.rows(sweep)
    assert first["optimizer.lr"] == "0.1" and "model" not in first


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no runs"):
        report.main([str(tmp_path)])


def test_a_run_is_known_by_its_config(tmp_path: Path) -> None:
    config = {"lr": 1, "paths": {"output_dir": str(tmp_path)}}
    assert not record.is_of(tmp_path, config)
    (tmp_path / record.RUN).write_text(json.dumps({"config_hash": record.config_hash(config)}))
    assert record.is_of(tmp_path, config) and not record.is_of(tmp_path, {**config, "lr": 2})
