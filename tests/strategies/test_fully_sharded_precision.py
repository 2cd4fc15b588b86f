"""Fully sharded replicas in other precisions: they have the numbers of DDP, and skip an update together."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.strategies.harness import (
    ALL,
    Report,
    Witness,
    complete,
    largest_difference,
    make_trainer,
    weights_of,
)
from tests.thorough import thorough
from tools.workers.pool import WorkerPool


def mixed(strategy: str, precision: str) -> Report:
    """With torch's DDP, or in shards."""
    torch.set_default_dtype(torch.float32)
    module, report = ALL["Blocks"](), Report()
    given = {"plugins": [MixedPrecision("16-mixed", "cpu")]} if precision == "16-mixed" else {"precision": precision}
    options = {"process_group_backend": "gloo", "find_unused_parameters": True} if strategy == "ddp" else {}
    trainer = make_trainer(strategy, [Witness(report)], options, gradient_clip_val=0.5, **given)
    trainer.fit(module, ALL["Blocks"].loader())
    report.weights = weights_of(module)
    return report


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", *thorough("bf16-mixed")])
def test_mixed_precision_has_the_numbers_of_ddp(pool: WorkerPool, precision: str) -> None:
    ddp, shards = (pool.run(mixed, 2, strategy, precision, init=False) for strategy in ("ddp", "fsdp"))
    assert [report.losses for report in ddp] == [report.losses for report in shards]
    assert largest_difference(ddp[0].weights, shards[0].weights) < 1e-7


class Spike(Callback):
    """Infinite gradients in the shard of one rank, in the second of three updates."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 1:
            module.blocks[1].mix.bias.grad.to_local().fill_(torch.inf)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.scales.append(float(trainer.precision_plugin.scaler.get_scale()))  # type: ignore[attr-defined]


def spiked() -> tuple[list[float], bool]:
    torch.set_default_dtype(torch.float32)
    module, spike = ALL["Blocks"](), Spike()
    trainer = make_trainer("fsdp", [spike], {}, plugins=[MixedPrecision("16-mixed", "cpu")], max_epochs=1)
    trainer.fit(module, ALL["Blocks"].loader(batch_size=4))
    return spike.scales, all(bool(torch.isfinite(complete(p.detach())).all()) for p in module.parameters())


def test_an_overflow_in_one_shard_skips_the_step_on_all(pool: WorkerPool) -> None:
    for scales, finite in pool.run(spiked, 2, init=False):
        assert scales[1] == scales[0] / 2 == scales[2]
        assert finite
