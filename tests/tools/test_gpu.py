"""`make gpu` runs its commands, says what failed, and says so where there is no GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from recipes.tables import Table, circumstances
from tools import gpu
from tools.bench import __main__ as bench
from tools.bench import report

pytest_plugins = ["pytester"]


def test_without_a_gpu_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main({"never": gpu.Command(60, ("no_such_module",))}, tmp_path / "gpu.json")
    assert "gpu: not run" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()


TABLE = ("tests.tools.test_gpu", "OUT")  # its end


@pytest.mark.programs
def test_all_commands_are_run_and_their_tables_kept_also_after_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    commands = {
        "fails": gpu.Command(60, ("no_such_module",)),
        "works": gpu.Command(60, (*TABLE, "ended")),
        "hangs": gpu.Command(60, (*TABLE, "hung: stopped after 1 s")),
        "cannot": gpu.Command(60, (*TABLE, "not run: one GPU")),
    }
    with pytest.raises(SystemExit, match="gpu: failed: fails, hangs$"):
        gpu.main(commands, tmp_path / "gpu.json")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["gpus"] == [] and found["versions"]["torch"] == torch.__version__
    runs = found["commands"]
    assert runs["fails"]["exit code"] == 1 and "No module named no_such_module" in runs["fails"]["end of output"][-1]
    assert {runs[name]["exit code"] for name in ("works", "hangs", "cannot")} == {0}
    assert runs["works"]["tables"][0]["rows"] == [{"number": 1, "how it ended": "ended"}]
    assert runs["works"]["not run"] == runs["works"]["failed"] == []
    assert runs["hangs"]["failed"] == ["One: 1: hung: stopped after 1 s"]
    assert runs["cannot"]["not run"] == ["One: 1: not run: one GPU"]
    assert runs["works"]["end of output"] == ["CUDA_DEVICE_MAX_CONNECTIONS=32"]


def test_the_measurements_of_make_gpu_are_known_to_the_command() -> None:
    commands = [each.arguments for each in gpu.COMMANDS.values() if each.arguments[0] == "tools.bench"]
    parts = bench._on("cuda")
    asked = {(what, part) for _, what, _, only, *_ in commands for part in only.split(",")}
    assert asked == {(what, part) for what in parts for part in parts[what]} - {
        ("tensor", part) for part in bench.TENSOR if part != "alone"
    }


def test_the_tests_that_need_a_gpu_are_found() -> None:
    files = [*gpu._words("TESTS", "")]
    assert "tests/strategies/test_gpu.py" in files and "tests/tensor/test_dropout.py" in files
    assert "tests/ranks/test_layout.py" not in files


@pytest.mark.parametrize(("gpus", "passed", "said"), [
    (0, 0, "2 gpu tests not run: no GPU on this machine"),
    (1, 1, "1 gpu tests not run: 1 GPU on this machine"),
    (2, 2, "2 passed*"),
])  # fmt: skip
def test_a_test_that_needs_more_gpus_than_there_are_is_not_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, gpus: int, passed: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    pytester.makeconftest("from tests.conftest import *")
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    timm\n    programs\n    thorough")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.gpu\ndef test_one(): pass\n@pytest.mark.gpu(2)\ndef test_two(): pass\n"
    )
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=passed, deselected=2 - passed)
    done.stdout.fnmatch_lines([f"*{said}"])


if __name__ == "__main__":  # a command that leaves a table with one row in a folder; how the row ended
    folder, how = sys.argv[1:]
    table = Table("One", {"number": "d", report.HOW: ""}, [[1, how]], "")
    report.write(Path(folder), "table", circumstances(), [table])
    print(f"CUDA_DEVICE_MAX_CONNECTIONS={os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')}")
