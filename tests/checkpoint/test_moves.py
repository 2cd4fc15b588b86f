"""What any layout has saved, in the middle of an epoch, goes on under any other as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.checkpoint import convert, read_full, read_plain
from tests.strategies.dealt import dealt
from tests.strategies.harness import largest_difference
from tests.strategies.saves import SavesIn
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

STEPS, MIDDLE, BATCHES = 12, 7, 5  # of the run, before the checkpoint, of an epoch
TOLERANCE = 1e-12

CUT = {"layers": ["embed", "first", "second", "head"], "microbatches": 2}
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
}  # fmt: skip
SYNCHRONOUS = [name for name in LAYOUTS if name != "async2"]
OFTEN = ["single", "ddp2", "fsdp2 x tp2"]  # targets in every run of the tests


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Moved(L.LightningModule):
    """Its optimizer, its schedulers and its hooks remember something, and so do its loader and its validation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second, self.head = nn.Embedding(12, 8), Block(), Block(), nn.Linear(8, 12)
        self.register_buffer("ended", torch.zeros(()))

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.second(self.first(self.embed(x)))), y)

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.training_step(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended += 1

    def configure_optimizers(self) -> Any:
        decayed, others = [*self.embed.parameters()], [*self.parameters()][1:]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], 0.02)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0), "monitor": "val"},
        ]

    def train_dataloader(self) -> DataLoader:
        return dealt(self.trainer, BATCHES)

    val_dataloader = train_dataloader


def train(layout: str, first: Path | None, saved: Path | None, final: Path) -> None:
    """Train from a checkpoint, or from the start, to the end."""
    torch.set_default_dtype(torch.float64)
    callbacks: list[Callback] = [] if saved is None else [SavesIn("on_train_batch_start", saved, MIDDLE)]
    if layout in ("single", "ddp2"):
        callbacks += [lp.ExactResume()]
    devices, strategy = LAYOUTS[layout]
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy(), max_steps=STEPS, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, gradient_clip_val=0.5,
    )  # fmt: skip
    module = Moved()
    if first is not None:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.add_(1.0)  # a checkpoint has to bring back all of them
    trainer.fit(module, ckpt_path=first)
    trainer.save_checkpoint(final)


class Runs:
    """Runs of the pool, of which those that several tests need are kept."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder

    def whole(self, layout: str) -> tuple[Path, Path]:
        """What a run that isn't stopped has saved in the middle and at its end."""
        middle, end = self._folder / f"{layout} middle.ckpt", self._folder / f"{layout} end.ckpt"
        if not end.exists():
            self._pool.run(train, LAYOUTS[layout][0], layout, None, middle, end, init=False)
        return middle, end

    def resumed(self, layout: str, first: Path) -> Path:
        """What a run from a checkpoint has saved at its end."""
        end = self._folder / f"{first.stem} to {layout}.ckpt"
        if not end.exists():
            self._pool.run(train, LAYOUTS[layout][0], layout, first, None, end, init=False)
        return end

    def converted(self, path: Path) -> Path:
        """A directory as a plain file."""
        other = path.with_name(f"{path.stem} converted.ckpt")
        if not other.exists():
            convert(path, other)
        return other


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("moves"))


def assert_same(one: Path, other: Path) -> None:
    """The same weights, optimizer states and schedulers."""
    assert largest_difference(read_full(one), read_full(other)) < TOLERANCE
    plain, expected = read_plain(one), read_plain(other)
    for mine, theirs in zip(plain["optimizer_states"], expected["optimizer_states"], strict=True):
        assert [group["lr"] for group in mine["param_groups"]] == [group["lr"] for group in theirs["param_groups"]]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            assert largest_difference(mine["state"][number], state) < TOLERANCE
    assert plain["global_step"] == expected["global_step"]


@pytest.mark.parametrize("source", ["tp2 x pp2", *thorough(*(name for name in LAYOUTS if name != "tp2 x pp2"))])
@pytest.mark.parametrize("target", [*OFTEN, *thorough(*(name for name in SYNCHRONOUS if name not in OFTEN))])
def test_a_run_goes_on_under_another_layout(runs: Runs, source: str, target: str) -> None:
    middle, _ = runs.whole(source)
    # A synchronous run has the numbers of one process. One that began asynchronously goes on as one process does from
    # there; that process reads the checkpoint's other kind.
    expected = runs.whole("single")[1] if source in SYNCHRONOUS else runs.resumed("single", runs.converted(middle))
    assert_same(runs.resumed(target, middle), expected)


@pytest.mark.parametrize("source", ["ddp2", "async2", *thorough(*(s for s in SYNCHRONOUS if s != "ddp2"))])
def test_an_asynchronous_run_goes_on_from_another_layout(runs: Runs, source: str) -> None:
    middle, end = runs.whole(source)
    first = runs.whole("single")[0] if source in SYNCHRONOUS else runs.converted(middle)
    assert_same(runs.resumed("async2", middle), runs.resumed("async2", first))
    if source == "async2":
        assert largest_difference(read_full(runs.resumed("async2", middle)), read_full(end)) == 0
