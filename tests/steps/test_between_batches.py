"""Stages go on to the next batch by themselves where that gains something, and nothing needs all of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins.precision import Precision

from lightning_parallel.schedules.generators import gpipe, interleaved, one_f_one_b
from lightning_parallel.schedules.v_shaped import zbv
from lightning_parallel.steps.between_batches import gained, reasons_to_wait


@pytest.mark.parametrize(("stages", "count"), [(2, 3), (4, 8), (4, 16), (8, 16)])
def test_a_v_gains_its_bubble_and_loops_gain_nothing(stages: int, count: int) -> None:
    assert gained(zbv(stages, count)) == pytest.approx((stages - 1) / 6 / (count + (stages - 1) / 6))
    for schedule in (gpipe, one_f_one_b, interleaved):
        assert gained(schedule(stages, count)) == 0
    assert gained(zbv(1, count)) == 0


class Clips(L.LightningModule):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "options", "shared", "reason"),
    [
        (L.LightningModule(), {}, [], None),
        (L.LightningModule(), {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, [], None),
        (L.LightningModule(), {"gradient_clip_val": 0.5}, [], "gradient_clip_val=0.5"),
        (Clips(), {}, [], "Clips.configure_gradient_clipping"),
        (L.LightningModule(), {}, ["position"], "'position', which several stages hold"),
    ],
)
def test_what_needs_all_stages_is_named(
    module: L.LightningModule, options: dict[str, Any], shared: list[str], reason: str | None
) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    found = list(reasons_to_wait(trainer, module, Precision(), shared, validates=False))
    assert len(found) == (reason is not None)
    assert reason is None or found[0].startswith(reason)
    validated = list(reasons_to_wait(trainer, module, Precision(), shared, validates=True))
    assert validated == [each for each in found if not each.startswith("gradient_clip_val")]
