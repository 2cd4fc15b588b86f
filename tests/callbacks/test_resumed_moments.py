"""Whenever a run is saved, the resumed one does what is left: batches, validations, schedulers, and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split
from torchmetrics import MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.wrappers import LambdaInputTransformer, Running

import lightning_parallel as lp
from lightning_parallel.private.lightning.batches import ends_update
from tests.strategies.harness import make_trainer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

Event = tuple[Any, ...]
Equal = Callable[[str, Mapping[str, Any]], list[Event]]
SAVED = "saved"


class Saves(Checkpoint):
    """Saves the run each time that it is in one of its hooks, as the last callback there."""

    def __init__(self, folder: Path | None, hook: str) -> None:
        if folder is not None:
            setattr(self, hook, lambda trainer, *_, **__: self.save(trainer, folder))

    def save(self, trainer: L.Trainer, folder: Path) -> None:
        if not trainer.sanity_checking:
            events: list[Event] = trainer.lightning_module.events  # type: ignore[assignment, union-attr]
            number = sum(SAVED in event[0] for event in events)
            trainer.save_checkpoint(folder / f"{number}.ckpt")
            events.append((SAVED if ends_update(trainer) else "saved in an update", number))


class Scheduled(L.LightningModule):
    """Notes what it does. Its rate falls by the metrics; its validation draws."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)
        self.mean = MeanMetric()
        self.interval = interval
        self.events: list[Event] = []

    def loss(self, batch: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(batch))).square().mean()

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        number, rate = self.trainer.fit_loop.total_batch_idx, self.trainer.optimizers[0].param_groups[0]["lr"]
        self.note("batch", batch_idx, number, repr(batch), rate, metrics)

    def validation_step(self, batch: Tensor) -> None:
        self.log("val", self.loss(batch) + torch.rand(()))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.note("validation", float(self.trainer.callback_metrics["val"]))

    def on_train_epoch_start(self) -> None:
        self.note("epoch")

    def on_train_epoch_end(self) -> None:
        epoch = {name: self.trainer.callback_metrics[name].item() for name in ("train_epoch", "largest", "mean")}
        self.note("epoch's end", self.current_epoch, epoch)

    def note(self, *what: Any) -> None:
        self.events.append((*what, self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        how = {"scheduler": plateau, "monitor": "val", "interval": self.interval, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": how}

    def train_dataloader(self) -> DataLoader:
        return lp.ResumableDataLoader(torch.arange(12.0)[:, None], batch_size=2, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4, 1), batch_size=2)


def run(
    resumed: Path | None, saves: Path | None, hook: str, options: Mapping[str, Any], strategy: Any = "auto"
) -> tuple[list[Event], dict[str, float], int]:
    """What a run has done, its metrics, and the steps that loggers count."""
    torch.set_default_dtype(torch.float64)
    options = dict(options)
    module = options.pop("kind", Scheduled)(options.pop("interval", "epoch"))
    brought = [*options.pop("callbacks", [])]
    brought += [] if isinstance(strategy, lp.PipelineStrategy) else [lp.Preemption(), lp.ExactResume()]
    torch.manual_seed(5)
    given = {"strategy": strategy, "max_epochs": 3, "num_sanity_val_steps": 2, "enable_checkpointing": True, **options}
    trainer = make_trainer("single", [Saves(saves, hook), *brought], {}, **given)
    trainer.fit(module, ckpt_path=resumed)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.events, metrics, trainer.fit_loop.epoch_loop._batches_that_stepped


def after(events: list[Event], number: int) -> list[Event]:
    """What a run has done after a save."""
    return [event for event in events[events.index((SAVED, number)) :] if SAVED not in event[0]]


@pytest.fixture
def equal_from_saves(request: pytest.FixtureRequest, tmp_path: Path) -> Equal:
    """Resumes a run from its saves, and compares all that follows. Returns what the whole run has done."""

    def equal(hook: str, options: Mapping[str, Any]) -> list[Event]:
        whole, *end = run(None, tmp_path, hook, options)
        saved = [event[1] for event in whole if event[0] == SAVED]
        assert saved
        # Of many each fifth one, which is at another place between validations and in an epoch.
        every = 1 if len(saved) < 5 or request.config.getoption("thorough") else 5
        for number in saved[-1::-every]:
            found, *found_end = run(tmp_path / f"{number}.ckpt", None, hook, options)
            rest = after(whole, number)
            assert (found, found_end) == (rest, end), (number, [event for event in found if event not in rest])
        return whole

    return equal


OPTIONS = {
    "a validation in mid-epoch": {"val_check_interval": 4},
    "validations in mid-epoch and at its end": {"val_check_interval": 3, "interval": "step"},
    "a validation every second epoch": {"check_val_every_n_epoch": 2},
    "validations across epochs": {"val_check_interval": 4, "check_val_every_n_epoch": None},
    "no validation": {"limit_val_batches": 0},
    "accumulated": {"accumulate_grad_batches": 2, "val_check_interval": 3, "interval": "step"},
    "so many steps": {"max_epochs": None, "max_steps": 9, "val_check_interval": 3},
    "so many steps, to an epoch's end": {"max_epochs": None, "max_steps": 12, "val_check_interval": 1.0},
}
HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end")
WITHOUT_GRADIENTS = ("on_train_batch_start", "accumulated")  # of an update that has begun, which aren't saved
WITHOUT_SAVES = ("on_validation_end", "no validation")
ROWS = sorted({*product(HOOKS, OPTIONS)} - {WITHOUT_GRADIENTS, WITHOUT_SAVES})
USUAL = [row for row in ROWS if row[0] == "on_train_batch_end" or row == (HOOKS[-1], "a validation in mid-epoch")]


@pytest.mark.parametrize(("hook", "options"), [*USUAL, *thorough(*(row for row in ROWS if row not in USUAL))])
def test_what_is_left_is_done(equal_from_saves: Equal, hook: str, options: str) -> None:
    equal_from_saves(hook, OPTIONS[options])


@pytest.mark.parametrize(("hook", "options", "said"), [
    ("on_validation_end", "accumulated", "in the middle of an update.*multiples of accumulate_grad_batches=2"),
    ("on_before_optimizer_step", "no validation", "Saved inside a training step.*rest of the epoch"),
    ("on_validation_batch_end", "a validation in mid-epoch", "Saved inside a validation"),
])  # fmt: skip
def test_a_checkpoint_of_what_will_differ_is_warned_of(tmp_path: Path, hook: str, options: str, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        run(None, tmp_path, hook, OPTIONS[options])


def test_a_save_inside_a_batch_has_it_before_its_update(tmp_path: Path) -> None:
    """What its step had drawn it draws again, so the next epoch may have another order."""
    whole, *_ = run(None, tmp_path, "on_before_optimizer_step", OPTIONS["no validation"])
    found, *_ = run(tmp_path / "7.ckpt", None, "", OPTIONS["no validation"])
    before, after_it = ([event[1:4] for event in each if event[0] == "batch"] for each in (whole, found))
    assert after_it[:5] == before[7:12]  # the rest of the second epoch


def test_a_second_fit_has_nothing_of_the_run_that_the_first_one_resumed(tmp_path: Path) -> None:
    run(None, tmp_path, "on_validation_end", {"max_epochs": 1})
    module, trainer = Scheduled("epoch"), make_trainer("single", [lp.ExactResume()], {}, limit_val_batches=0)
    trainer.fit(module, ckpt_path=tmp_path / "0.ckpt")
    assert "val" in trainer.callback_metrics
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    assert "val" not in trainer.callback_metrics


class MeanOfMeans(Metric):
    """Its result depends on how often it was updated."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, value: Tensor) -> None:
        self.mean = self.mean + (value - self.mean) / self.update_count

    def compute(self) -> Any:
        return self.mean


class Unusual(Scheduled):
    """Draws where its data are split, and at the beginning of the run and of epochs. Asks for its length, for which
    Lightning makes the loaders before the checkpoint's places are known. Logs metrics that wrap others, or count."""

    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.kinds = nn.ModuleDict({
            "sum": MeanMetric() + SumMetric(), "running": Running(MeanMetric(), window=3), "counts": MeanOfMeans(),
            "least": LambdaInputTransformer(MinMetric(), torch.neg),
        })  # fmt: skip

    def train_dataloader(self) -> DataLoader:
        half, _ = random_split(range(24), [12, 12])  # type: ignore[arg-type]
        samples = torch.tensor([float(sample) for sample in half])[:, None]
        return lp.ResumableDataLoader(samples, batch_size=2, shuffle=True)

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        self.note("epoch", torch.rand(()).item())

    def training_step(self, batch: Tensor) -> Tensor:
        for name, metric in self.kinds.items():
            metric.update(batch.mean())
            self.log(name, metric, on_step=False, on_epoch=True, metric_attribute=f"kinds.{name}")
        return super().training_step(batch)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.note("metrics", {name: self.trainer.callback_metrics[name].item() for name in self.kinds})


class SkipsTheRest(Scheduled):
    """Leaves out the rest of an epoch."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:  # type: ignore[override]
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == 4 else None


@pytest.mark.parametrize(("kind", "hook"), [*product([Unusual], HOOKS), *product([SkipsTheRest], HOOKS[1:])])
def test_what_is_left_of_an_unusual_run_is_done(equal_from_saves: Equal, kind: type[Scheduled], hook: str) -> None:
    equal_from_saves(hook, {"val_check_interval": 4 if kind is Unusual else 2, "kind": kind})


class TwoLoaders(Scheduled):
    """Of unequal lengths."""

    mode = "max_size"

    def training_step(self, batch: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().training_step(batch[0])

    def train_dataloader(self) -> Any:
        short = lp.ResumableDataLoader(torch.arange(100.0, 104.0)[:, None], batch_size=2, shuffle=True)
        return CombinedLoader([super().train_dataloader(), short], self.mode)


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_loaders_of_unequal_lengths_go_on(equal_from_saves: Equal, mode: str, hook: str) -> None:
    kind = type("Kind", (TwoLoaders,), {"mode": mode})
    equal_from_saves(hook, {"kind": kind, "limit_val_batches": 0, "max_epochs": 2})


class Stops(Unusual):
    """Something in a step tells the Trainer to stop."""

    def training_step(self, batch: Tensor) -> Tensor:
        self.trainer.should_stop = self.trainer.should_stop or self.trainer.global_step == 7
        return super().training_step(batch)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
def test_a_run_that_was_to_stop_stops(equal_from_saves: Equal, caplog: pytest.LogCaptureFixture, hook: str) -> None:
    with caplog.at_level("INFO"):
        whole = equal_from_saves(hook, {"val_check_interval": 4, "kind": Stops})
    assert "To train on, resume it from an earlier checkpoint" in caplog.text
    assert [event[-1] for event in whole if event[0] != SAVED][-1] == 8


@pytest.mark.parametrize(("limit", "raised"), [
    ({"max_epochs": 2}, {"max_epochs": 4}),
    ({"max_epochs": None, "max_steps": 12}, {"max_epochs": None, "max_steps": 15}),
])  # fmt: skip
def test_a_run_that_has_ended_goes_on_with_a_raised_limit(tmp_path: Path, limit: Any, raised: Any) -> None:
    whole, *end = run(None, None, "", {**raised, "kind": Unusual})
    ended = run(None, tmp_path, "on_train_end", {**limit, "kind": Unusual})[0]
    rest, *rest_end = run(tmp_path / "0.ckpt", None, "", {**raised, "kind": Unusual})
    assert ([event for event in ended if event[0] != SAVED] + rest, rest_end) == (whole, end)


@pytest.mark.parametrize("limit", [{}, {"max_epochs": None, "max_steps": 14}])
def test_a_run_that_was_saved_before_it_began_begins(equal_from_saves: Equal, limit: Any) -> None:
    equal_from_saves("on_fit_start", limit)


def parallel(layers: list[str] | None, folder: Path, hook: str, resumed: int | None, devices: int = 2) -> Any:
    strategy = lp.PipelineStrategy(layers=layers, microbatches=1)
    path = None if resumed is None else folder / f"{resumed}.ckpt"
    options = {"val_check_interval": 2, "devices": devices}
    return run(path, folder if path is None else None, hook, options, strategy)


@pytest.mark.parametrize(("layers", "hook"), [
    (["first", "last"], "on_train_batch_end"),
    *thorough(*((None, hook) for hook in HOOKS[1:]), *((["first", "last"], hook) for hook in HOOKS[2:])),
])  # fmt: skip
def test_ranks_do_what_is_left(pool: WorkerPool, tmp_path: Path, hook: str, layers: list[str] | None) -> None:
    whole = pool.run(parallel, 2, layers, tmp_path, hook, None, init=False)
    for number in (1, 4):
        if (SAVED, number) in whole[0][0]:
            found = pool.run(parallel, 2, layers, tmp_path, hook, number, init=False)
            for (events, *end), (found_events, *found_end) in zip(whole, found, strict=True):
                assert (found_events, found_end) == (after(events, number), end)


def test_another_number_of_stages_goes_on_with_the_same_batches(pool: WorkerPool, tmp_path: Path) -> None:
    """In the next epoch too, of which the generators decide."""
    [(whole, *_)] = pool.run(parallel, 1, ["first"], tmp_path, "on_train_batch_end", None, 1, init=False)
    left = [event[1:4] for event in after(whole, 4) if event[0] == "batch"]
    for found, *_ in pool.run(parallel, 2, ["first", "last"], tmp_path, "", 4, init=False):
        assert [event[1:4] for event in found if event[0] == "batch"] == left
