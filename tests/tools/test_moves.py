"""The run of the page that is disturbed and moved: in a small form."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tools.moves import Leg, draw, losses, run

SMALL = ["data.batch_size=12", "data.context=16", "model.width=16", "model.heads=2", "trainer.limit_val_batches=1"]


@pytest.mark.thorough
def test_a_run_that_is_disturbed_and_moved_has_the_losses_of_one_that_is_not(tmp_path: Path) -> None:
    legs = [Leg("single", 0.3, signal.SIGKILL), Leg("pipeline_gpipe")]
    run(tmp_path / "alone", 48, [Leg("single")], SMALL)
    _, end = run(tmp_path / "moved", 48, legs, SMALL)
    whole, moved = losses(tmp_path / "alone"), losses(tmp_path / "moved")
    assert end == 48 and whole.keys() == moved.keys() == set(range(48))
    assert max(abs(moved[step] - whole[step]) for step in whole) < 1e-5


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    whole = {step: 3.0 - step / 10 for step in range(9)}
    legs = [Leg("single", 0.3, signal.SIGTERM), Leg("ddp", 0.6, signal.SIGKILL), Leg("fully_sharded")]
    draw(tmp_path / "moves.png", whole, whole, [3, 6, 9], legs)
    assert (tmp_path / "moves.png").read_bytes().startswith(b"\x89PNG")
