"""Precision as in a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from tests.pool import WorkerPool
from tests.strategies.harness import here, largest_difference, paste
from tests.strategies.observed import CLASSES, WIDTH, Net, loader, make_trainer
from tests.thorough import thorough


class Deep(Net):
    """Five layers with a normalisation, so that autocast has something to decide."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
            nn.Linear(16, CLASSES),
        )  # fmt: skip
        self.dtypes: set[torch.dtype] = set()

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"net.2": "column", "net.4": "row"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.dtypes.add(torch.get_default_dtype())
        logits = self.net(batch[0])
        self.dtypes.add(logits.dtype)
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


class Watch(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in here(module).items() if p.grad is not None})


def train(strategy: str, precision: Any, **options: Any) -> dict[str, Any]:
    watch, module = Watch(), Deep()
    chosen: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # on the CPU Lightning would fall back to bfloat16
        chosen = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    options_of_strategy = {} if strategy == "tensor" else {"microbatches": 2}
    make_trainer(strategy, [watch], options_of_strategy, **chosen, **options).fit(module, loader(), loader(8, 4, 5))
    trainer = module.trainer
    return {
        "losses": watch.losses,
        "gradients": watch.gradients,
        "weights": {name: p.detach() for name, p in here(module).items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "shards": trainer.strategy.local_model.shards if strategy == "tensor" else {},  # type: ignore[attr-defined]
        "dtypes": module.dtypes,
        "logged": str(trainer.callback_metrics["train_loss"].dtype),
    }


def joined(ranks: list[dict[str, Any]], update: int | None = None) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for rank in ranks:
        for name, tensor in (rank["weights"] if update is None else rank["gradients"][update]).items():
            if name in rank["shards"]:
                paste(result, name, tensor, rank["shards"][name])
            else:
                result[name] = tensor
    return result


TOLERANCE = {"32-true": 1e-5, "64-true": 1e-12, "bf16-mixed": 0.02, "bf16-true": 0.04, "16-mixed": 0.005}


@pytest.mark.parametrize(("strategy", "precision"), [
    ("sync", "64-true"), ("sync", "bf16-mixed"), ("sync", "bf16-true"), ("sync", "16-mixed"),
    ("tensor", "bf16-mixed"), ("tensor", "bf16-true"), ("tensor", "16-mixed"),
    *thorough(("sync", "32-true"), ("tensor", "32-true")),
])  # fmt: skip
def test_numbers_are_those_of_a_single_process(pool: WorkerPool, strategy: str, precision: str) -> None:
    single = pool.run(train, 1, "single", precision, init=False, gradient_clip_val=1.0)[0]
    ranks = pool.run(train, 3, strategy, precision, init=False, gradient_clip_val=1.0)
    tolerance = TOLERANCE[precision]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(single["losses"], rel=0, abs=tolerance)
        assert rank["metrics"] == pytest.approx(single["metrics"], rel=0, abs=tolerance)
        assert rank["logged"] == single["logged"]
    assert ranks[0]["dtypes"] == single["dtypes"]
    weights = joined(ranks)
    assert {name: w.dtype for name, w in weights.items()} == {n: w.dtype for n, w in single["weights"].items()}
    assert largest_difference(weights, single["weights"]) < tolerance
    assert len(ranks[0]["gradients"]) == len(single["gradients"])
    scale = max(float(g.abs().max()) for g in single["gradients"][0].values())
    assert largest_difference(joined(ranks, 0), single["gradients"][0]) < tolerance * max(1.0, scale)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", *thorough("32-true", "bf16-true")])
def test_asynchronous_training_learns_in_every_precision(pool: WorkerPool, precision: str) -> None:
    single = pool.run(train, 1, "single", precision, init=False, max_epochs=1)[0]
    ranks = pool.run(train, 2, "async", precision, init=False, max_epochs=1)
    # The first forward is that of a single process; later ones are computed with weights of an update before.
    assert ranks[0]["losses"][0] == pytest.approx(single["losses"][0], rel=0, abs=TOLERANCE[precision])
    assert ranks[0]["dtypes"] == single["dtypes"]
    weights = joined(ranks)
    assert {name: w.dtype for name, w in weights.items()} == {n: w.dtype for n, w in single["weights"].items()}
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert ranks[1]["metrics"] == ranks[0]["metrics"]


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

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.net[layer] = self.spiked = Spiked(16, 16)
        self.before: list[dict[str, Tensor]] = []
        self.scales: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before.append({name: p.detach().clone() for name, p in here(self).items()})
        self.spiked.spike = batch_idx == 1

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scales.append(float(scaler.get_scale()))


def overflow(strategy: str, layer: int) -> tuple[list[float], list[bool]]:
    """The loss scale after each batch, and whether the weights have moved in it."""
    module = Overflows(layer)
    trainer = make_trainer(
        strategy, [], {"microbatches": 2}, plugins=[MixedPrecision("16-mixed", "cpu")], max_epochs=1,
        gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, loader())
    states = [*module.before, {name: p.detach() for name, p in here(module).items()}]
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(states, states[1:], strict=False)]
    assert all(torch.isfinite(p).all() for p in states[-1].values())
    return module.scales, moved


def test_an_overflow_on_one_stage_skips_the_step_on_all(pool: WorkerPool) -> None:
    single = pool.run(overflow, 1, "single", 2, init=False)[0]
    assert single[1] == [True, False, True]
    assert single[0][1] == single[0][0] / 2
    assert pool.run(overflow, 3, "sync", 2, init=False) == [single] * 3


class OverflowsFused(Overflows):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def overflow_fused(strategy: str) -> tuple[list[float], list[bool]]:
    """As :func:`overflow`, with an optimizer that unscales gradients itself."""
    module = OverflowsFused(2)
    make_trainer(
        strategy, [], {"microbatches": 2}, plugins=[MixedPrecision("16-mixed", "cpu")], max_epochs=1
    ).fit(module, loader())  # fmt: skip
    states = [*module.before, {name: p.detach() for name, p in here(module).items()}]
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(states, states[1:], strict=False)]
    return module.scales, moved


def test_a_fused_optimizer_skips_its_step_on_all_stages(pool: WorkerPool) -> None:
    single = pool.run(overflow_fused, 1, "single", init=False)[0]
    assert single[1] == [True, False, True]
    assert pool.run(overflow_fused, 2, "sync", init=False) == [single] * 2


class OverflowsOnOneRank(Overflows):
    """In one step one tensor rank's shard gets infinite gradients, and nothing else does."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before.append({name: p.detach().clone() for name, p in here(self).items()})
        if batch_idx == 1 and self.global_rank == 1:  # before, hooks on parameters are refused
            self.net[4].weight.register_hook(self._spiked)

    def _spiked(self, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf")) if self.trainer.fit_loop.batch_idx == 1 else gradient

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"net.4": "column", "net.6": "row"}


def overflow_on_one_rank() -> tuple[list[float], list[bool]]:
    module = OverflowsOnOneRank(2)
    plugin = MixedPrecision("16-mixed", "cpu")
    make_trainer("tensor", [], plugins=[plugin], max_epochs=1, gradient_clip_val=1.0).fit(module, loader())
    states = [*module.before, {name: p.detach() for name, p in here(module).items()}]
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(states, states[1:], strict=False)]
    return module.scales, moved


def test_an_overflow_in_one_shard_skips_the_step_on_all(pool: WorkerPool) -> None:
    for scales, moved in pool.run(overflow_on_one_rank, 2, init=False):
        assert moved == [True, False, True]
        assert scales[1] == scales[0] / 2


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


def test_the_loss_scale_is_the_user_s_and_is_resumed(pool: WorkerPool, tmp_path: Path) -> None:
    (grown, resumed), other = pool.run(resume_scaler, 2, tmp_path / "half.ckpt", init=False)
    assert grown == resumed == 16.0
    assert other == (grown, resumed)
