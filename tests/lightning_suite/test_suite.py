"""A folder of tests stands for Lightning's: what takes part, what passes on both ranks, and what becomes of a rank that
waits for one that has failed."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.lightning_suite.__main__ import outcomes, record, section, that_count

TESTS = """
import os
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

SETTINGS = {"max_steps": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}

def test_equal(tmp_path):
    trainer = pl.Trainer(**SETTINGS)
    trainer.fit(BoringModel())
    (tmp_path / "same").write_text("of both ranks")
    assert trainer.global_step == 1 and [*tmp_path.iterdir()] == [tmp_path / "same"]

def test_on_one_rank():
    trainer = pl.Trainer(**SETTINGS)
    assert trainer.global_rank == 0
    trainer.fit(BoringModel())

def test_without_a_trainer():
    assert True
"""


@pytest.mark.thorough  # of a tool, `make lightning-tests`, which starts pytest three times
@pytest.mark.skipif(sys.platform != "linux", reason="it forks")
def test_a_test_has_to_pass_on_both_ranks(tmp_path: Path) -> None:
    folder, among = tmp_path / "tests_pytorch", tmp_path / "among"
    folder.mkdir()
    (folder / "test_one.py").write_text(TESTS)
    single = outcomes(folder, "single", 0, ["."], tmp_path / "single.jsonl", None)
    counted = that_count(single)
    assert [test.rpartition("::")[2] for test in counted] == ["test_equal", "test_on_one_rank"]
    among.write_text("\n".join(counted))
    two = outcomes(folder, "tensor x 2", 2, ["."], tmp_path / "two.jsonl", among)
    found = {"ddp x 2": single, "tensor x 2": two}  # in the place of DDP's outcomes: which tests count is shown above
    assert [passed for _, passed, _ in two.values()] == [True, False]
    kept = record(found, ["tensor x 2"], {"lightning": version("lightning"), "pipeline": {"tests": 3, "failed": {}}})
    assert kept["tensor x 2"]["tests"] == 2 and len(kept["tensor x 2"]["failed"]) == 1
    assert "| of | 3 | 2 |" in section(kept)
    assert [*record(found, ["tensor x 2"], {"lightning": "1.0", "pipeline": {}})] == ["lightning", "tensor x 2"]
