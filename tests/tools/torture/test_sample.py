"""A case of the kill matrix (`make torture`), from its beginning to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes import ROOT
from tests.clusters.disturbed import variables
from tools.torture.cases import SMALL_SAMPLE


@pytest.mark.programs
@pytest.mark.parametrize("name", SMALL_SAMPLE)
def test_a_run_goes_on_after_it(tmp_path: Path, name: str) -> None:
    """As the matrix is run: by a process that has imported everything, and that others are forked from."""
    folders = ["--out", tmp_path / "torture.json", "--folder", tmp_path / "runs"]
    program = [sys.executable, "-m", "tools.torture", "--only", name, "--jobs", "1", *folders]
    done = subprocess.run(program, cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "1 of 1 cases held" in done.stdout, done.stdout + done.stderr
