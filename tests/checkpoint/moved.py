"""A module that remembers much, runs of it that are saved and go on elsewhere, and averages of its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.checkpoint import read_full, read_plain
from tests.strategies.dealt import dealt
from tests.strategies.harness import largest_difference, make_trainer, spoil
from tests.strategies.saves import SavesIn
from tools.workers.pool import WorkerPool

STEPS, MIDDLE, BATCHES = 7, 4, 3  # of the run, before the checkpoint, of an epoch
TOLERANCE = 1e-12

CUT: dict[str, Any] = {"layers": ["embed", "first", "second", "head"], "microbatches": 2}
PLAN = {"plan": {"first.up": "column", "first.down": "row", "second.up": "column", "second.down": "row"}}
LAYOUTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "single": (1, lambda: "auto"),
    "ddp2": (2, lambda: "ddp"),
    "fsdp2": (2, lp.FullyShardedStrategy),
    "tp2": (2, lambda: lp.TensorParallelStrategy(**PLAN)),
    "pp2": (2, lambda: lp.PipelineStrategy(**CUT)),
    "pp3": (3, lambda: lp.PipelineStrategy(schedule="1f1b", **CUT)),
    "async2": (2, lambda: lp.AsyncPipelineStrategy(**CUT)),
    "dp2 x pp2": (4, lambda: lp.PipelineStrategy(stages=2, data_parallel=2, **CUT)),
    "fsdp2 x pp2": (4, lambda: lp.PipelineStrategy(stages=2, data_parallel_kind="fully_shard", **CUT)),
    "fsdp2 x tp2": (
        4, lambda: lp.PipelineStrategy(stages=1, tensor_parallel=2, data_parallel_kind="fully_shard", **PLAN)
    ),
    "tp2 x pp2": (4, lambda: lp.PipelineStrategy(stages=2, tensor_parallel=2, **CUT, **PLAN)),
    "whole batches": (2, lambda: lp.PipelineStrategy(**{**CUT, "microbatches": 1})),
    "directory": (1, lambda: lp.PipelineStrategy(checkpoint="directory", **CUT)),
    "replicas": (2, lambda: lp.PipelineStrategy(stages=1, checkpoint="directory", **CUT)),
    "background": (2, lambda: lp.PipelineStrategy(async_save=True, **CUT)),
    "late": (1, lambda: lp.AsyncPipelineStrategy(checkpoint="directory", **CUT)),
    "zbv": (2, lambda: lp.PipelineStrategy(schedule="zbv", **CUT)),
}  # fmt: skip
MOVED = [*LAYOUTS][: [*LAYOUTS].index("whole batches")]  # those that runs move between


class Block(nn.Module):
    """With a buffer that changes what it computes, and one that no checkpoint has, so no layer may read it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * (1 + 0.01 * self.calls)


class Moved(L.LightningModule):
    """Its optimizer, its schedulers and its hooks remember something, and so do its loader and its validation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second, self.head = nn.Embedding(12, 8), Block(), Block(), nn.Linear(8, 12)
        self.validated: list[Any] = []

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embed(x))))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.logits(x), y)

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.training_step(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val"])

    def on_train_batch_end(self, *_: Any) -> None:
        for block in (self.first, self.second):
            block.calls += 1
            block.unsaved += 2

    def configure_optimizers(self) -> Any:
        decayed, *others = self.parameters()
        optimizer = torch.optim.AdamW([{"params": [decayed], "weight_decay": 0.1}, {"params": others}], 0.02)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), "monitor": "val"},
        ]

    def train_dataloader(self) -> DataLoader:
        return dealt(self.trainer, BATCHES)

    test_step = validation_step
    val_dataloader = test_dataloader = train_dataloader


class FromThird(WeightAveraging):
    """A user's own: equal weights, from the third step on."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 3


AVERAGES: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "ema": lambda: [EMAWeightAveraging(decay=0.8)],
    "swa": lambda: [FromThird()],
    "multi": lambda: [WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=False)],
}


def trainer_of(layout: str, *callbacks: Callback, **given: Any) -> L.Trainer:
    """That writes nothing and shows nothing."""
    devices, strategy = LAYOUTS[layout]
    return make_trainer("single", [*callbacks], {}, devices=devices, strategy=strategy(), **given)


def train(
    kind: type[Moved], average: str, layout: str, first: Path | None, saved: Path | None, final: Path
) -> list[float]:
    """Train from a checkpoint, or from the start, to the end. Returns what validations and a test logged."""
    torch.set_default_dtype(torch.float64)
    callbacks = [*AVERAGES[average](), *([] if saved is None else [SavesIn("on_train_batch_start", saved, MIDDLE)])]
    if layout in ("single", "ddp2"):
        callbacks += [lp.ExactResume()]
    given = {"max_epochs": -1, "num_sanity_val_steps": 1, "use_distributed_sampler": False, "gradient_clip_val": 0.5}
    trainer, module = trainer_of(layout, *callbacks, max_steps=STEPS, **given), kind()
    if first is not None:
        spoil(module)
        for buffer in module.buffers():
            buffer.add_(1.0)
    trainer.fit(module, ckpt_path=first)
    trainer.save_checkpoint(final)
    again = trainer.validate(module, verbose=False)
    tested = trainer.test(module, ckpt_path=saved, verbose=False)  # an average loads it, too
    return [*map(float, module.validated), again[0]["val"], tested[0]["val"]]


class Runs:
    """Runs of the pool, of which those that several tests need are kept."""

    def __init__(self, pool: WorkerPool, folder: Path, kind: type[Moved]) -> None:
        self._pool, self._folder, self._kind = pool, folder, kind
        self._validated: dict[Path, list[float]] = {}

    def run(self, average: str, layout: str, first: Path | None = None) -> tuple[Path, Path, list[float]]:
        """What a run has saved in the middle, if it isn't resumed, and at its end, and its validations."""
        name = f"{average} {layout}" if first is None else f"{first.stem} to {average} {layout}"
        middle, end = self._folder / f"{name} middle.ckpt", self._folder / f"{name} end.ckpt"
        if end not in self._validated:
            arguments = (self._kind, average, layout, first, middle if first is None else None, end)
            self._validated[end] = self._pool.run(train, LAYOUTS[layout][0], *arguments, init=False)[0]
        return middle, end, self._validated[end]


def assert_same(one: Path, other: Path) -> None:
    """The same weights, counts, optimizer states and schedulers."""
    assert largest_difference(read_full(one), read_full(other)) < TOLERANCE
    plain, expected = read_plain(one), read_plain(other)
    for mine, theirs in zip(plain["optimizer_states"], expected["optimizer_states"], strict=True):
        assert [group["lr"] for group in mine["param_groups"]] == [group["lr"] for group in theirs["param_groups"]]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            assert largest_difference(mine["state"][number], state) < TOLERANCE
    assert plain["global_step"] == expected["global_step"]
