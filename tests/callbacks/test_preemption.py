"""A signal ends a run between two batches on all ranks, saved; the resumed run equals the one that wasn't stopped.
So does trainer.should_stop of one rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_parallel as lp
from tests.strategies import harness
from tests.strategies.harness import complete, here
from tests.strategies.saves import SavesIn
from tests.thorough import thorough
from tools.workers.pool import Failure, WorkerPool
from tools.workers.worker import texts_of_warnings

BATCHES, EPOCHS, EVERY = 6, 2, 3  # batches an epoch, epochs, batches between validations
SIGNALS = [signal.SIGTERM, signal.SIGUSR1]
Kill = tuple[str, int, int, int]  # in which step, at which batch, on which rank, which signal


class Model(pl.LightningModule):
    """Its hooks, schedulers and validation leave traces in the numbers."""

    def __init__(self, kill: Kill | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())
        self.last = nn.Linear(8, 2)
        self.register_buffer("ended", torch.zeros(()))
        self.kill = kill
        self.seen: list[tuple[str, int, float]] = []

    def _step(self, name: str, batch: Any) -> Tensor:
        here = name, self.trainer.fit_loop.total_batch_idx, rank_zero_only.rank
        if self.kill is not None and self.kill[:3] == here:
            os.kill(os.getpid(), self.kill[3])
        x, y = batch
        return nn.functional.mse_loss(self.last(self.second(self.first(x))), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step("training", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._step("validation", batch))

    def on_train_batch_end(self, *args: Any) -> None:
        self.ended += 1

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append(("val", self.trainer.global_step, float(self.trainer.callback_metrics["val"])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
        how = {"scheduler": plateau, "monitor": "val", "interval": "step", "frequency": EVERY}
        return {"optimizer": optimizer, "lr_scheduler": how}


LAYERS = ["first", "second", "last"]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": lambda: "ddp",
    "pipeline": lambda: lp.PipelineStrategy(microbatches=2, layers=LAYERS),
    "replicas": lambda: lp.PipelineStrategy(microbatches=2, stages=1),
    "of stages": lambda: lp.AsyncPipelineStrategy(microbatches=2, stages=2, layers=LAYERS),
    "asynchronous": lambda: lp.AsyncPipelineStrategy(microbatches=2, layers=LAYERS),
    "asynchronous in a V": lambda: lp.AsyncPipelineStrategy(microbatches=2, schedule="vmin"),
    "tensor": lambda: lp.TensorParallelStrategy(plan={"first.0": "column", "second.0": "row"}),
    "fully sharded": lp.FullyShardedStrategy,
    "threads": lp.DataParallelStrategy,
}
WORLDS = {"single": 1, "threads": 1, "of stages": 4}  # of others 2


def make_trainer(
    name: str, saved_before: int | None = None, *, save_weights_only: bool = False, **options: Any
) -> pl.Trainer:
    strategy = STRATEGIES[name]()
    brought = [lp.Preemption(), lp.ExactResume()] if isinstance(strategy, str) else []
    saves = SavesIn("on_train_batch_start", "saved/before.ckpt", saved_before)
    checkpoint = ModelCheckpoint(dirpath="saved", save_top_k=0, save_weights_only=save_weights_only)
    callbacks = [*brought, *options.pop("callbacks", []), saves, checkpoint]
    devices = 2 if name == "threads" else WORLDS.get(name, 2)
    own = {"val_check_interval": EVERY, "num_sanity_val_steps": 1, "use_distributed_sampler": False, "devices": devices}
    settings = {"strategy": strategy, "max_epochs": EPOCHS, "enable_checkpointing": True, **own, **options}
    return harness.make_trainer("single", callbacks, {}, **settings)


def loaders() -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator))
    return lp.ResumableDataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)


def train(name: str, kill: Kill | None, drained_before: int | None = None) -> dict[str, Any]:
    """What a run leaves; one that is killed is resumed.

    Args:
        name: of the strategy.
        kill: when, where and how.
        drained_before: a batch before which a run that isn't killed is saved, for which a pipeline drains.
    """
    pl.seed_everything(3, verbose=False)
    before = [signal.getsignal(number) for number in SIGNALS]
    model, seen = Model(kill), []
    trainer = make_trainer(name, drained_before)
    if kill is None:
        trainer.fit(model, *loaders())
    else:
        with pytest.raises(SystemExit) as left:
            trainer.fit(model, *loaders())
        assert not left.value.code and trainer.received_sigterm
        assert [signal.getsignal(number) for number in SIGNALS] == before
        seen, stopped_at = model.seen, trainer.fit_loop.total_batch_idx
        pl.seed_everything(3, verbose=False)
        torch.rand(7)  # a generator in another state
        model, trainer = Model(), make_trainer(name)
        trainer.fit(model, *loaders(), ckpt_path="saved/last.ckpt")
        drained_before = stopped_at + 1
    scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
    return {
        "parameters": {name: complete(p.detach()) for name, p in here(model).items()},
        "batches": int(model.ended), "steps": trainer.global_step, "rates": scheduler.get_last_lr(),
        "validated": seen + model.seen, "drained before": drained_before,
    }  # fmt: skip


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Bit by bit, on every rank."""
    for one, other in zip(found, expected, strict=True):
        parameters = [each.pop("parameters") for each in (one, other)]
        assert one == other
        assert all(torch.equal(parameters[0][name], value) for name, value in parameters[1].items())
        assert parameters[1]


# After a batch in the middle of an epoch, before a validation, at an epoch's end, and at the end.
BATCHES_OF_SIGNALS = [1, 2, BATCHES - 1, EPOCHS * BATCHES - 1]


@pytest.mark.parametrize(("name", "step", "batches"), [
    ("single", "training", BATCHES_OF_SIGNALS), ("ddp", "training", [BATCHES - 1]),
    ("pipeline", "validation", [2]),  # which ends first
    *thorough(*(
        (name, "training", BATCHES_OF_SIGNALS) for name in ("pipeline", "ddp", "threads", "fully sharded", "tensor")
    )),
])  # fmt: skip
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    pool: WorkerPool, name: str, step: str, batches: list[int]
) -> None:
    world = WORLDS.get(name, 2)
    whole = pool.run(train, world, name, None, init=False)
    for batch, number in zip(batches, cycle(SIGNALS), strict=False):
        kill: Kill = (step, batch, world - 1, number)
        found = pool.run(train, world, name, kill, init=False)
        assert_equal(found, [{**rank, "drained before": batch + 1} for rank in whole])


@pytest.mark.parametrize("name", ["asynchronous in a V", *thorough("asynchronous")])
def test_an_asynchronous_one_as_if_it_had_drained_there(pool: WorkerPool, name: str) -> None:
    """It stops one batch later than a stage may be ahead of another one; at the latest where an epoch ends, since all
    meet there."""
    found = pool.run(train, 2, name, ("training", 4, 0, signal.SIGTERM), init=False)
    assert_equal(found, pool.run(train, 2, name, None, BATCHES, init=False))


def accumulate() -> int:
    model = Model(("training", 0, 0, signal.SIGTERM))
    trainer = make_trainer("pipeline", accumulate_grad_batches=3)
    with pytest.raises(SystemExit):
        trainer.fit(model, *loaders())
    return int(model.ended)


def test_an_update_that_has_begun_is_completed(pool: WorkerPool) -> None:
    assert pool.run(accumulate, 2, init=False) == [3, 3]


class StopsOneRank(Callback):
    """Sets ``trainer.should_stop`` on the last rank alone, in one hook, from a step on."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self._stop)

    def _stop(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step >= self.step and rank_zero_only.rank == 1


# By hook, the step from which on a rank wants to stop there, and after how many batches the run ends.
ENDS = {
    "on_train_start": (0, 0),
    "on_train_epoch_start": (1, BATCHES),
    "on_train_batch_end": (1, 1),
    "on_validation_end": (1, EVERY),
    "on_train_epoch_end": (1, BATCHES),
}


def stop_one(name: str) -> dict[str, tuple[int, int]]:
    """The steps of ``ENDS``, and after how many batches each run has ended."""
    ended = {}
    for hook, (step, _) in ENDS.items():
        model = Model()
        make_trainer(name, callbacks=[StopsOneRank(hook, step)], limit_val_batches=1).fit(model, *loaders())
        ended[hook] = step, int(model.ended)
    return ended


@pytest.mark.parametrize("name", [
    "pipeline", "asynchronous", *thorough("of stages", "tensor", "replicas", "fully sharded", "ddp")
])  # fmt: skip
def test_all_ranks_stop_if_one_wants_to(pool: WorkerPool, name: str) -> None:
    """Otherwise the others would wait for it until the timeout."""
    # The first stage may be a batch ahead of the last one. So what one rank wants after a batch, all do two later.
    ends = ENDS | {"on_train_batch_end": (1, 3)} if name in ("of stages", "asynchronous") else ENDS
    world = WORLDS.get(name, 2)
    assert pool.run(stop_one, world, name, init=False) == [ends] * world


class TakesItBack(Callback):
    """Sets ``trainer.should_stop`` in an epoch that has to end first, and not any more where it ends, as a search for a
    learning rate within a run does, or ``at_once``."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 1 or (trainer.should_stop and not self.at_once)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = False


def take_back(name: str, at_once: bool) -> int:
    model = Model()
    make_trainer(name, callbacks=[TakesItBack(at_once)], min_epochs=1).fit(model, *loaders())
    return int(model.ended)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", ["asynchronous in a V", *thorough("single", "pipeline")])
def test_a_stop_that_is_taken_back_does_not_hold_or_is_refused(pool: WorkerPool, name: str, at_once: bool) -> None:
    """One rank's may be lost to the other before it comes to the same batch's end."""
    refused = at_once and "asynchronous" in name
    ended = pool.run(take_back, WORLDS.get(name, 2), name, at_once, init=False, expect_errors=refused)
    if refused:
        assert any("trainer.should_stop was set" in str(each) for each in ended)
    else:
        assert set(ended) == {EPOCHS * BATCHES}


class FailsWhereAnotherStops(Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 and rank_zero_only.rank == 1:
            raise ValueError("alone")
        trainer.should_stop |= trainer.global_step == 2


def fail_where_another_stops() -> None:
    make_trainer("asynchronous in a V", callbacks=[FailsWhereAnotherStops()]).fit(Model(), *loaders())


def test_a_rank_that_wants_to_stop_does_not_wait_for_one_that_fails(pool: WorkerPool) -> None:
    stopping, failing = pool.run(fail_where_another_stops, 2, init=False, expect_errors=True)
    assert "PeerLostError: " in stopping and failing.rstrip().endswith("ValueError: alone")


class KillsFirst(Callback):
    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)


def evaluate() -> None:
    make_trainer("pipeline", callbacks=[KillsFirst()]).validate(Model(), loaders()[1])


def test_an_evaluation_ends(pool: WorkerPool) -> None:
    """The other ranks lose their connection to it."""
    first, other = pool.run(evaluate, 2, init=False, expect_errors=True)
    assert first.rstrip().endswith("SIGTERMException") and isinstance(other, Failure)


def save_weights_only() -> tuple[list[str], list[str]]:
    model = Model(("training", 1, 0, signal.SIGTERM))
    trainer = make_trainer("single", save_weights_only=True)
    with texts_of_warnings() as told, pytest.raises(SystemExit):
        trainer.fit(model, *loaders())
    return os.listdir(), [text for text in told if "SIGTERM" in text]


def test_without_a_whole_checkpoint_it_is_said_that_nothing_is_saved(pool: WorkerPool) -> None:
    ((files, said),) = pool.run(save_weights_only, 1, init=False)
    assert files == [] and said == [
        "SIGTERM after step 2: not saved, since no ModelCheckpoint saves whole checkpoints."
    ]


def own_handlers() -> tuple[list[int], int]:
    """The signals that handlers of the user's own get, and the batches that are trained."""
    got: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: got.append(number))
    for number in reversed(SIGNALS):
        model = Model(("training", 1, 0, number))
        with suppress(SystemExit):
            make_trainer("single").fit(model, *loaders())
    return got, int(model.ended)


def test_a_handler_of_the_user_s_own_is_called_too_and_keeps_sigusr1_to_itself(pool: WorkerPool) -> None:
    assert pool.run(own_handlers, 1, init=False) == [([signal.SIGUSR1, signal.SIGTERM], 2)]


class SignalledAtItsError(Callback):
    """The launcher ends a rank that has lost a peer, while the rank deals with that."""

    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("once")

    def on_exception(self, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def fail_and_get_a_signal() -> None:
    with pytest.raises(ValueError, match="once"):
        make_trainer("single", callbacks=[SignalledAtItsError()]).fit(Model(), *loaders())


def test_a_signal_does_not_take_the_place_of_an_error(pool: WorkerPool) -> None:
    pool.run(fail_and_get_a_signal, 1, init=False)
