"""`make gpu` runs its parts, says what failed, and says so where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools import gpu


def test_without_a_gpu_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main({"never": gpu.Command(60, ("no_such_module",))}, tmp_path / "gpu.json")
    assert "gpu: not run" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


def test_all_parts_are_run_and_their_tables_kept_also_after_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    parts = {
        "fails": gpu.Command(60, ("no_such_module",)),
        "works": gpu.Command(60, ("tests.tools.leaves_a_table", "OUT")),
    }
    with pytest.raises(SystemExit, match="gpu: failed: fails$"):
        gpu.main(parts, tmp_path / "gpu.json")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["fails"]["exit code"] == 1 and "No module named no_such_module" in found["fails"]["end of output"][-1]
    assert found["works"]["exit code"] == 0 and found["works"]["tables"][0]["rows"] == [{"number": 1}]
    assert found["gpus"] == [] and found["versions"]["torch"] == torch.__version__


def test_all_parts_together_take_ten_minutes_at_most() -> None:
    assert sum(each.limit for each in gpu.COMMANDS.values()) <= 600
