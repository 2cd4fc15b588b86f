"""Saves in the background write what is there when they begin, one at a time, and a failure ends all ranks together."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_parallel.checkpoint import directory, is_checkpoint, slices
from tests.checkpoint.moved import assert_same
from tests.checkpoint.test_slices import Gpu, OnGpu
from tests.strategies.failures import assert_refused
from tests.strategies.harness import ALL, make_trainer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

LAYOUTS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "stages": (2, "sync", "LeNet", {"microbatches": 2}),
    "asynchronous": (2, "async", "LeNet", {"microbatches": 2}),
    "fully sharded shards": (
        4, "sync", "ShardableGPT2", {"stages": 1, "tensor_parallel": 2, "data_parallel_kind": "fully_shard"}
    ),
}  # fmt: skip


def fit(layout: str, callbacks: list[Callback], *, async_save: bool, epochs: int = 2) -> L.Trainer:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    _, strategy, model, options = LAYOUTS[layout]
    options = {"async_save": async_save, **options}
    trainer = make_trainer(strategy, callbacks, options, max_epochs=epochs, enable_checkpointing=True)
    trainer.fit(ALL[model](), ALL[model].loader())
    return trainer


def saved(layout: str, folder: Path, kind: str) -> bool:
    """Train with saves of a kind; from a GPU that only pretends. Returns whether the main thread waited for it."""
    gpu, boxes_of, waits = Gpu(), slices.boxes_of, list[threading.Thread]()

    def current_stream(device: torch.device) -> Gpu:
        waits.append(threading.current_thread())
        return gpu

    with pytest.MonkeyPatch.context() as patch:
        if kind == "from a GPU":
            patch.setattr(slices, "boxes_of", lambda x: [(at, OnGpu.of(part, gpu)) for at, part in boxes_of(x)])
            patch.setattr(torch.cuda, "current_stream", current_stream)
        keepers = [ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=each) for each in (2, 4)]
        fit(layout, keepers, async_save=kind != "at once")
    return threading.main_thread() in waits


@pytest.mark.parametrize("layout", ["stages", *thorough("asynchronous", "fully sharded shards")])
def test_what_is_written_later_is_the_state_at_the_save(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    kinds = {"at once": False, "from a CPU": False, "from a GPU": True}
    for kind, waits in kinds.items():
        assert {*pool.run(saved, LAYOUTS[layout][0], layout, tmp_path / kind, kind, init=False)} == {waits}
    names = {kind: sorted(path.name for path in (tmp_path / kind).iterdir()) for kind in kinds}
    assert names["at once"] == names["from a CPU"] == names["from a GPU"] and "step=4-v1.ckpt" in names["at once"]
    for kind, name in itertools.product(("from a CPU", "from a GPU"), names["at once"]):
        assert_same(tmp_path / "at once" / name, tmp_path / kind / name)


class Graph(Callback):
    """Its state has a loss that wasn't detached, which can't be deep-copied."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.loss = next(iter(trainer.strategy.local_model.parameters.values())).sum() * 2  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}


class Slow(Callback):
    """Saves in the background wait before they are renamed, until so many batches have begun, or for some seconds. The
    first ``fails`` of them fail."""

    def __init__(self, batches: int, fails: int = 0, seconds: float = 20) -> None:
        self.begun = threading.Event()
        self.batches, self.fails, self.seconds = batches, fails, seconds
        self.replace = directory.replace
        self.whole: list[list[str]] = []  # the checkpoints that are whole, batch by batch

    def setup(self, *_: Any, **__: Any) -> None:
        def replace(new: Path, path: Path) -> None:
            self.begun.wait(self.seconds)
            time.sleep(0.1)  # the run ends before the last save does, unless it waits
            if self.fails:
                self.fails -= 1
                raise OSError(28, "No space left on device")
            self.replace(new, path)

        directory.replace = replace  # type: ignore[assignment]

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        folder = Path(trainer.checkpoint_callback.dirpath)  # type: ignore[union-attr,arg-type]
        found = {path: is_checkpoint(path) for path in folder.glob("*.ckpt")}
        # A process that is killed leaves nothing by its name that isn't whole.
        assert self.begun.is_set() or all(each or not os.path.lexists(path) for path, each in found.items())
        self.whole.append(sorted(path.name for path, is_whole in found.items() if is_whole))
        if 0 < self.batches <= trainer.fit_loop.total_batch_idx:
            self.begun.set()

    def teardown(self, *_: Any, **__: Any) -> None:
        directory.replace = self.replace


def while_one_is_written(folder: Path) -> tuple[list[list[str]], bool]:
    """The checkpoints that are whole, batch by batch. Is one, when `save_checkpoint` has returned after the run?"""
    slow = Slow(6)
    keeper = ModelCheckpoint(folder / "run", "{step}", every_n_train_steps=4, save_top_k=1)
    trainer = fit("stages", [slow, Graph(), keeper], async_save=True, epochs=4)
    later = Slow(0, seconds=0.2)
    later.setup()
    trainer.save_checkpoint(folder / "later.ckpt")
    later.teardown()
    return slow.whole, is_checkpoint(folder / "later.ckpt")


def test_training_goes_on_meanwhile_and_the_older_one_stays_until_the_new_one_is_whole(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (whole, waited), (_, other_waited) = pool.run(while_one_is_written, 2, tmp_path, init=False)
    assert waited and other_waited  # after a run nothing goes on meanwhile
    # The first save waits for the sixth batch, though it began after the fourth.
    assert whole[:6] == [[]] * 6 and len(whole) > 8
    assert all(one or not earlier for earlier, one in zip(whole[6:], whole[7:], strict=False))
    [newest] = (tmp_path / "run").glob("*.ckpt")  # the end has waited
    assert is_checkpoint(newest)


def fit_with_a_link(folder: Path) -> None:
    fit("stages", [ModelCheckpoint(folder, save_last="link")], async_save=True)


def test_a_link_to_what_is_still_written_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    failures = pool.run(fit_with_a_link, 2, tmp_path, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["save_last='link'", "async_save=True"])


def failing(folder: Path, layout: str, fails: int) -> tuple[str, int]:
    slow = Slow(6, fails)
    keeper = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=1)
    try:
        fit(layout, [slow, keeper], async_save=True, epochs=20)
    except RuntimeError as error:
        return str(error), len(slow.whole)
    finally:
        slow.teardown()
    raise AssertionError("nothing has failed")


@pytest.mark.parametrize(("layout", "fails"), [("asynchronous", 99), ("stages", 1)])
def test_a_failed_save_ends_all_ranks_after_the_next_one(
    pool: WorkerPool, tmp_path: Path, layout: str, fails: int
) -> None:
    (one, begun), (other, begun_there) = pool.run(failing, 2, tmp_path, layout, fails, init=False)
    for message in (one, other):
        assert "could not be saved in the background" in message and "No space left on device" in message
    assert begun == begun_there < 60
    assert [path.name for path in tmp_path.glob("*.ckpt*")] == ([] if fails > 1 else ["step=8.ckpt"])
