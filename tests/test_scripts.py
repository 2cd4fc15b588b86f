"""Scripts that pages print whole, under their names: every command that starts one runs, as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import ROOT
from tests.thorough import thorough

PAGES = [ROOT / "README.md", ROOT / "README.ko.md", *sorted((ROOT / "docs").rglob("*.md"))]
TITLED = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def scripts_of(page: Path) -> dict[str, str]:
    return dict(TITLED.findall(page.read_text()))


def commands_of(page: Path) -> list[str]:
    shell = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in shell for line in block.splitlines()]
    return [line for line in lines if re.match(r"python \w+\.py\b", line)]


STARTED = [(page, command) for page in PAGES for command in commands_of(page)]
SHOWN = {page: scripts_of(page) for page in PAGES}


def test_scripts_of_a_name_are_the_same_on_all_pages() -> None:
    versions: dict[str, set[str]] = {}
    for scripts in SHOWN.values():
        for name, text in scripts.items():
            versions.setdefault(name, set()).add(re.sub(r"  # .*$", "", text, flags=re.MULTILINE))  # two languages
    assert versions and all(len(texts) == 1 for texts in versions.values()), [*versions]


def test_every_script_is_started_on_its_page() -> None:
    assert {(page, name) for page, scripts in SHOWN.items() for name in scripts} == {
        (page, command.split()[1]) for page, command in STARTED
    }


ONCE = {command: page for page, command in reversed(STARTED)}  # the README's train.py is the one of a page, too


@pytest.mark.parametrize("command", [list(ONCE)[-1], *thorough(*list(ONCE)[:-1])])
def test_scripts_run_as_printed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in SHOWN[ONCE[command]].items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_steps" in done.stderr and "memory expected" in done.stdout + done.stderr
