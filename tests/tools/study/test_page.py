"""tools/study/page and the command: the page says what is there, and what is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.study.small import TINY, fill, write_text
from tools.study import page
from tools.study.__main__ import main
from tools.study.arms import OPTIMIZERS, STAGES, Arm, Run, arms
from tools.study.store import FILE, Store
from tools.study.studies import STUDIES

PLAN = list(arms(["adamw", "muon"], [8, 4]))
STUDY = replace(STUDIES["asynchrony"], setting=TINY, plan=tuple(arms(OPTIMIZERS, STAGES)))


def made_up(run: Run) -> float | None:
    """Late gradients cost a tenth, and half a percent with second order; m=1 diverges at the highest rate."""
    arm = run.arm
    if arm.microbatches == 1 and not arm.synchronous and run.rate > 0.02:
        return None
    cost = 0.0 if arm.synchronous else 0.005 if arm.correction == "second_order" else 0.1
    return (2.0 + 0.1 * run.seed) * (1 + cost + abs(run.rate - 0.012))


def test_the_page_counts_and_names_what_is_missing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    fill(store, TINY, [arm for arm in PLAN if arm.stages != 4 and arm.optimizer == "adamw"], 2, made_up)
    page.write(tmp_path, STUDY, TINY, PLAN, 3, store)
    text = (tmp_path / page.PAGE).read_text()
    missing = len(PLAN) * 5 - len(store.results)
    assert missing > 0 and f"**{len(store.results)} of " in text
    words = " ".join(text.split())
    assert "Muon synchronous (1), Muon p=8 (10), AdamW p=4 (7), Muon p=4 (7)" in words
    assert "### AdamW, 8 stages" in text and "Muon, 8" not in text and "4 stages" not in text


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


def test_arms_that_a_study_does_not_have_are_not_asked_for(tmp_path: Path) -> None:
    few = replace(STUDY, plan=(Arm("adamw"),), task=write_text(tmp_path / "text"))
    with pytest.raises(SystemExit, match="asynchrony has no arms with --optimizers muon"):
        main(["asynchrony", "--output", str(tmp_path), "--optimizers", "muon", "--report"], few)
