"""A stop that a step asks for waits until all stages meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_parallel.parts.held_stop import HeldStop


@pytest.mark.parametrize("several", [True, False])
def test_a_stop_is_held_back_where_there_are_several_stages(several: bool) -> None:
    trainer: Any = SimpleNamespace(should_stop=False)
    stop = HeldStop(trainer, several)
    with stop.around_batch():
        trainer.should_stop = True
    assert trainer.should_stop is not several
    with stop.around_batch():
        pass
    stop.release()
    assert trainer.should_stop


def test_a_stop_from_elsewhere_counts_at_once() -> None:
    trainer: Any = SimpleNamespace(should_stop=True)
    stop = HeldStop(trainer, several=True)
    with stop.around_batch():
        trainer.should_stop = True
    assert trainer.should_stop
    trainer.should_stop = False
    stop.release()
    assert not trainer.should_stop
