"""Scripts that pages print whole, under their names: every command that starts one runs, as printed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from recipes import ROOT
from tests.test_pages import DOCS, KOREAN, README, SCRIPT, commands
from tests.thorough import thorough

PAGES = [README, KOREAN, *DOCS]
TITLED = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def scripts_of(page: Path) -> dict[str, str]:
    return dict(TITLED.findall(page.read_text()))


def script_of(command: str) -> str:
    return next(word for word in command.split() if word.endswith(".py"))


STARTED = [(page, command) for page in PAGES for command in commands(page) if re.match(SCRIPT, command)]
SHOWN = {page: scripts_of(page) for page in PAGES}


def test_scripts_of_a_name_are_the_same_on_all_pages_and_each_is_started() -> None:
    versions: dict[str, set[str]] = {}
    for scripts in SHOWN.values():
        for name, text in scripts.items():
            versions.setdefault(name, set()).add(re.sub(r"  # .*$", "", text, flags=re.MULTILINE))  # two languages
    assert versions and all(len(texts) == 1 for texts in versions.values()), [*versions]
    assert {(page, name) for page, scripts in SHOWN.items() for name in scripts} == {
        (page, script_of(command)) for page, command in STARTED
    }


ONCE = {command: page for page, command in reversed(STARTED)}  # the README's train.py is the one of a page, too


@pytest.mark.programs
@pytest.mark.parametrize(
    "command", [each for each in ONCE if "cli.py" not in each] + thorough(*(each for each in ONCE if "cli.py" in each))
)
def test_scripts_run_as_printed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in SHOWN[ONCE[command]].items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program, *words = shlex.split(command)
    start = [sys.executable, *(["-m", "torch.distributed.run"] if program == "torchrun" else []), *words]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    if script_of(command) == "loop.py":
        wanted = losses_of_one_process()
        for text in (done.stdout, ONCE[command].read_text()):
            losses = [float(found) for found in re.findall(r"^ *update \d+: loss (.*)$", text, re.MULTILINE)]
            assert losses == pytest.approx(wanted, abs=2e-5)
    else:
        assert "max_steps" in done.stderr and "memory expected" in done.stdout + done.stderr


def losses_of_one_process() -> list[float]:
    """Of the model and the batch of loop.py."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)], nn.Linear(64, 10))
    x = torch.randn(64, 64)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.001), []
    for _ in range(20):
        loss = cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[4::5]


def test_examples_are_the_scripts_of_the_pages() -> None:
    pages = {
        name: text for page, scripts in SHOWN.items() if page.parent == ROOT / "docs" for name, text in scripts.items()
    }
    assert {file.name: file.read_text() for file in (ROOT / "examples").glob("*.py")} == pages


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        exec(source, names)
    assert names["together"] == pytest.approx(names["alone"], rel=1e-5)
    assert "gpipe bubble 27.3%" in capsys.readouterr().out
