"""tools/study/page and the command: the page says what is there, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.study.small import TINY, write_text
from tools.study import page
from tools.study.__main__ import main
from tools.study.arms import OPTIMIZERS, STAGES, arms
from tools.study.store import FILE
from tools.study.studies import STUDIES

STUDY = replace(STUDIES["asynchrony"], setting=TINY, plan=tuple(arms(OPTIMIZERS, STAGES)))


@pytest.mark.thorough
def test_the_command_runs_a_small_study_and_reports_it_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    study = replace(STUDY, task=write_text(tmp_path / "text"))
    options = ["asynchrony", "--output", str(tmp_path), "--optimizers", "adamw", "--stages", "2"]
    main([*options, "--seeds", "1", "--until", "0.05"], study)
    assert (tmp_path / FILE).exists() and "adamw synchronous" in capfd.readouterr().out
    before = (tmp_path / page.PAGE).read_text()
    (tmp_path / page.PAGE).unlink()
    main([*options, "--seeds", "1", "--report"], study)
    assert (tmp_path / page.PAGE).read_text() == before
    assert "data stdlib sha256:of the tests" in before


def test_fewer_updates_keep_the_share_of_the_warm_up(tmp_path: Path) -> None:
    study = replace(STUDIES["asynchrony"], task=write_text(tmp_path / "text"))
    main(["asynchrony", "--output", str(tmp_path), "--report", "--updates", "50"], study)
    text = (tmp_path / page.PAGE).read_text()
    assert "updates 50," in text and "linearly over 10 updates" in " ".join(text.split())
