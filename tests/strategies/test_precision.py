"""Precision as in a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_parallel.ranks.local_model import local_part
from tests.strategies.harness import Report, Witness, collect, joined, largest_difference, weights_of
from tests.strategies.observed import CLASSES, WIDTH, Net, loader, make_trainer
from tests.thorough import thorough
from tools.optimizer_table.optimizers import LAMB


class Deep(Net):
    """Five layers with a normalisation, so that autocast has something to decide."""

    def build(self) -> None:
        torch.set_default_dtype(torch.float32)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
            nn.Linear(16, CLASSES),
        )  # fmt: skip
        self.dtypes: set[torch.dtype] = set()

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"net.2": "column", "net.4": "row"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.dtypes.add(torch.get_default_dtype())
        logits, loss = self.logits_and_loss(batch)
        self.dtypes.add(logits.dtype)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.logits_and_loss(batch)[1])


def train(strategy: str, precision: Any, **options: Any) -> tuple[Report, set[torch.dtype], str]:
    """What this rank has, the dtypes in the step, and that of what it logs."""
    report, module = Report(), Deep()
    chosen: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # on the CPU Lightning would fall back to bfloat16
        chosen = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    options_of_strategy = {"sync": {"microbatches": 2}, "ddp": {"process_group_backend": "gloo"}}.get(strategy, {})
    trainer = make_trainer(strategy, [Witness(report)], options_of_strategy, max_epochs=1, **chosen, **options)
    trainer.fit(module, loader(), loader(8, 4, 5))
    return collect(report, trainer, module), module.dtypes, str(trainer.callback_metrics["train_loss"].dtype)


TOLERANCE = {"32-true": 1e-5, "64-true": 1e-12, "bf16-mixed": 0.02, "bf16-true": 0.04, "16-mixed": 0.005}


@pytest.mark.parametrize(("strategy", "precision"), [
    ("sync", "bf16-mixed"), ("sync", "16-mixed"), ("tensor", "bf16-mixed"), ("tensor", "bf16-true"),
    ("fsdp", "16-mixed"), ("fsdp", "bf16-true"),
    *thorough(
        ("sync", "64-true"), ("sync", "32-true"), ("sync", "bf16-true"), ("tensor", "32-true"), ("tensor", "16-mixed"),
        ("fsdp", "bf16-mixed"),
    ),
])  # fmt: skip
def test_numbers_are_those_of_a_single_process_or_of_ddp(launch: Any, strategy: str, precision: str) -> None:
    """Shards round as DDP does, so they have its numbers; ranks of a replica those of one process, nearly."""
    others, count, ranks, tolerance = "single", 1, 3, TOLERANCE[precision]
    if strategy == "fsdp":
        others, count, ranks, tolerance = "ddp", 2, 2, 2e-7  # float32 has 1.2e-7 next to 1
    expected = launch(train, count, others, precision, gradient_clip_val=1.0)
    found = launch(train, ranks, strategy, precision, gradient_clip_val=1.0)
    for (report, _, logged), (own, _, logs) in zip(found, expected * (ranks // count), strict=True):
        assert report.losses == pytest.approx(own.losses, rel=0, abs=tolerance)
        assert report.metrics == pytest.approx(own.metrics, rel=0, abs=tolerance)
        assert logged == logs
    reports, (whole, dtypes, _) = [report for report, *_ in found], expected[0]
    assert found[0][1] == dtypes
    weights = joined(reports, "weights")
    assert {name: w.dtype for name, w in weights.items()} == {name: w.dtype for name, w in whole.weights.items()}
    assert largest_difference(weights, whole.weights) < tolerance
    assert len(reports[0].gradients) == len(whole.gradients)
    scale = max(float(g.abs().max()) for g in whole.gradients[0].values())
    first = joined(reports, "gradients", 0)
    assert largest_difference(first, whole.gradients[0]) < tolerance * max(1.0, scale)


class Spiked(nn.Linear):
    """Its output's gradient is infinite where ``spike`` says so."""

    spike = False

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.spike and output.requires_grad:
            output.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
        return output


class Overflows(Deep):
    """In one step the gradients of a layer, and of those before it, are infinite; those after it have finite ones."""

    def build(self) -> None:
        super().build()
        self.net[2] = self.spiked = Spiked(16, 16)
        self.before: list[dict[str, Tensor]] = []
        self.scales: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before.append(weights_of(self))
        self.spiked.spike = batch_idx == 1

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scales.append(float(scaler.get_scale()))


def fused(self: nn.Module) -> torch.optim.Optimizer:
    """It unscales gradients itself."""
    return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


OverflowsFused = type("OverflowsFused", (Overflows,), {"configure_optimizers": fused})


class OverflowsOnOneRank(Overflows):
    """In one step one rank's shard of a gradient is infinite, and nothing else is."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before.append(weights_of(self))

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == 1 and self.global_rank == 1:
            local_part(self.net[4].weight.grad).fill_(torch.inf)

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"net.4": "column", "net.6": "row"}


# With an optimizer that steps whole parameters on their owners.
OverflowsByWholes = type(
    "OverflowsByWholes", (OverflowsOnOneRank,), {"configure_optimizers": lambda self: LAMB(self.parameters())}
)


def overflow(kind: type[Overflows], strategy: str, clip: float | None) -> tuple[list[float], list[bool]]:
    """The loss scale after each batch, and whether the weights have moved in it."""
    module, plugin = kind(), MixedPrecision("16-mixed", "cpu")
    own = {"plugins": [plugin], "max_epochs": 1, "gradient_clip_val": clip, "use_distributed_sampler": False}
    make_trainer(strategy, [], **own).fit(module, loader())
    states = [*module.before, weights_of(module)]
    assert all(torch.isfinite(p).all() for p in states[-1].values())
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(states, states[1:], strict=False)]
    return module.scales, moved


@pytest.mark.parametrize(("kind", "strategy", "ranks", "clip"), [
    (Overflows, "sync", 3, 1.0), (OverflowsFused, "sync", 2, None), (OverflowsOnOneRank, "tensor", 2, 1.0),
    (OverflowsByWholes, "tensor", 2, 1.0), (OverflowsOnOneRank, "fsdp", 2, 1.0),
])  # fmt: skip
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    launch: Any, kind: type[Overflows], strategy: str, ranks: int, clip: float | None
) -> None:
    found = launch(overflow, ranks, kind, strategy, clip)
    for scales, moved in found:
        assert moved == [True, False, True]
        assert scales[1] == scales[0] / 2
    if not issubclass(kind, OverflowsOnOneRank):
        assert found == launch(overflow, 1, kind, "single", clip) * ranks


def resume_scaler(path: Path) -> tuple[float, float]:
    def make() -> Any:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
        return make_trainer("sync", [], {"microbatches": 2}, plugins=[plugin], max_epochs=1)

    trainer = make()
    trainer.fit(Deep(), loader())
    trainer.save_checkpoint(path)
    grown = float(trainer.precision_plugin.scaler.get_scale())
    resumed = make()
    resumed.fit(Deep(), loader(), ckpt_path=path)
    return grown, float(resumed.precision_plugin.scaler.get_scale())


def test_the_loss_scale_is_the_user_s_and_is_resumed(launch: Any, tmp_path: Path) -> None:
    (grown, resumed), other = launch(resume_scaler, 2, tmp_path / "half.ckpt")
    assert grown == resumed == 16.0
    assert other == (grown, resumed)
