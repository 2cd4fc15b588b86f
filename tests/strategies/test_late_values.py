"""Losses and metrics that stages read before they have them are the last stage's; all stages stop after one batch."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_parallel.private.lightning import batches
from tests.strategies.harness import ALL, delayed, make_trainer
from tests.strategies.models import Deep
from tools.workers.pool import Failure
from tools.workers.worker import texts_of_warnings

EXACT = 1e-12  # float64
V = {"schedule": "zbv", "microbatches": 4}
SYNC = {"microbatches": 4}
LATE = {"microbatches": 2}
LAYOUTS = pytest.mark.parametrize(("strategy", "stages", "options"), [("sync", 2, V), ("async", 3, LATE)])


class Net(ALL["LeNet"]):  # type: ignore[misc]
    """Logs its loss."""

    stop_in_step: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        if self.global_step == self.stop_in_step:
            self.trainer.should_stop = True
        return loss


class Reads(Callback):
    """Reads all that there is, of each batch, in the batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []

    def on_before_backward(self, trainer: L.Trainer, module: Any, loss: Tensor) -> None:
        assert f"{loss:.3f}" and bool(loss.isfinite())

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        shown = trainer.progress_bar_metrics["loss"]
        logged = dict(trainer.logged_metrics)["loss"]
        self.seen.append((outputs["loss"].item(), float(trainer.callback_metrics["loss"]), float(logged), float(shown)))


def run(strategy: str, options: dict[str, Any], callbacks: list[Callback], **given: Any) -> L.Trainer:
    module = given.pop("kind", Net)()
    module.stop_in_step = given.pop("stop_in_step", None)
    trainer = make_trainer(strategy, callbacks, options, **given)
    trainer.fit(module, Net.loader())
    return trainer


def read(strategy: str, options: dict[str, Any], **given: Any) -> Any:
    """What is read in each batch, and warnings of what waits."""
    with texts_of_warnings() as told:
        reads = Reads()
        run(strategy, options, [reads], **given)
    return reads.seen, [text for text in told if "waits for the last one" in text]


class Counts(Callback):
    """Reads nothing but counts what waited, and keeps losses."""

    def __init__(self) -> None:
        self.awaited = -1
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.kept.append(outputs["loss"].detach())
        trainer.callback_metrics.update({"own": torch.tensor(1.0)})

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.awaited = trainer.strategy.at_work.last_stage.outcomes.awaited  # type: ignore[attr-defined]


def read_at_the_end(strategy: str, options: dict[str, Any]) -> tuple[int, list[float]]:
    counts = Counts()
    run(strategy, options, [counts, EarlyStopping("loss")])
    return counts.awaited, [float(loss) for loss in counts.kept]


@LAYOUTS
def test_nothing_waits_where_nothing_is_read_in_a_batch(
    launch: Any, strategy: str, stages: int, options: dict[str, Any]
) -> None:
    runs = launch(read_at_the_end, stages, strategy, options)
    assert [awaited for awaited, _ in runs] == [0] * stages
    assert all(losses == runs[0][1] for _, losses in runs) and len({*runs[0][1]}) > 3


# -- the end ---------------------------------------------------------------------------------------------------------


class Stops(Callback):
    """Early stopping on the loss of a batch, on the ranks that are given, or on all."""

    def __init__(self, below: float, rank: int | None = None) -> None:
        self.below, self.rank = below, rank

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        if self.rank in (None, trainer.global_rank) and outputs["loss"] < self.below:
            trainer.should_stop = True


def steps(strategy: str, options: dict[str, Any], below: float = 0.0, rank: int | None = None, **given: Any) -> int:
    return run(strategy, options, [Stops(below, rank)], **given).global_step


@LAYOUTS
def test_each_stage_reads_the_numbers_of_the_last_one_and_all_stop_by_them_after_the_same_batch(
    launch: Any, strategy: str, stages: int, options: dict[str, Any]
) -> None:
    """Each stage that waits for one says so once, with the line. What is in flight at an early stop is ended, too."""
    last, *others = launch(read, stages, strategy, options)
    if strategy == "sync":
        expected = launch(read, 1, "single", {})[0][0]
    else:
        losses = launch(delayed, 1, Net, stages, 2, epochs=2)[0].losses
        expected = [(loss,) * 4 for loss in losses]
    assert last[0] == [pytest.approx(values, rel=0, abs=EXACT) for values in expected]
    assert last[1] == []
    for other in others:
        assert other[0] == last[0]
        (text,) = other[1]
        assert "test_late_values.py" in text and "Reads.on_before_backward" in text
    losses = [values[0] for values in last[0]]
    below = sorted(losses)[2] + EXACT
    stop = next(i for i, loss in enumerate(losses) if loss < below) + 1
    assert 1 < stop < len(losses)
    assert launch(steps, stages, strategy, options, below) == [stop] * stages


@pytest.mark.parametrize(
    ("strategy", "stages", "options", "rank"),
    [("sync", 3, V, 2), ("async", 3, LATE, 0), ("async", 3, LATE, "step"), ("sync", 3, SYNC, 1)],
)
def test_a_stop_on_one_stage_ends_all_after_the_same_batch(
    launch: Any, strategy: str, stages: int, options: dict[str, Any], rank: Any
) -> None:
    wanted = {"stop_in_step": 2} if rank == "step" else {"below": 1e9, "rank": rank}
    found = launch(steps, stages, strategy, options, max_epochs=20, **wanted)
    set_after = 3 if rank == "step" else 1
    ahead = {"schedule": 1, "microbatches": 2}[[*options][0]]
    later = 0 if options is SYNC else ahead + 1
    assert found == [min(set_after + later, 3)] * stages  # after 3 batches the epoch ends, where all meet


def timed(strategy: str, options: dict[str, Any]) -> tuple[int, int, int]:
    kind = type(make_trainer(strategy, [], options).strategy)
    with (
        patch.object(kind, "broadcast", autospec=True, side_effect=kind.broadcast) as broadcast,
        patch.object(batches, "rank_zero_info") as said,
    ):
        trainer = run(strategy, options, [], max_time={"seconds": 0.3}, max_epochs=-1)
    return trainer.global_step, broadcast.call_count, said.call_count


def test_max_time_ends_all_stages_after_the_same_batch_and_nobody_waits_for_it(launch: Any) -> None:
    runs = launch(timed, 2, "sync", V, timeout=60)
    assert len({run[:2] for run in runs}) == 1
    steps, broadcasts, _ = runs[0]
    assert steps >= 1 and broadcasts <= 2  # those of the start
    assert max(said for *_, said in runs) == 1  # whoever stops first may stop the others before they notice


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2 and rank_zero_only.rank == 0:  # in a step, global_rank is the replica's
            raise KeyError("on the last stage")
        return super().training_step(batch, batch_idx)


def read_of_a_lost_stage() -> None:
    make_trainer("async", [Reads()], LATE).fit(Fails(), Fails.loader())


def test_a_wait_for_a_stage_that_is_gone_ends(launch: Any) -> None:
    last, *others = launch(read_of_a_lost_stage, 3, timeout=60, expect_errors=True)
    assert isinstance(last, Failure) and "KeyError" in str(last)
    assert all(isinstance(other, Failure) and "PeerLostError" in str(other) for other in others)


# -- between batches -------------------------------------------------------------------------------------------------


def ahead() -> Any:
    """How many batches stages may be ahead."""
    trainer = make_trainer("sync", [], V, max_epochs=1, limit_train_batches=1)
    trainer.fit(ALL["Blocks"](), ALL["Blocks"].loader())
    return trainer.strategy.batches_ahead  # type: ignore[attr-defined]


def test_stages_wait_for_a_parameter_that_several_hold(launch: Any) -> None:
    assert launch(ahead, 2) == [0, 0]


RUNS = 10  # at most, until one is undisturbed


def begins_and_ends(schedule: str) -> tuple[float, float]:
    """On this rank: when it began its first forward of the last batch, and when it ended the batch before it."""
    trainer = make_trainer("sync", [], {"schedule": schedule, "microbatches": 4, "timeline": True}, max_epochs=1)
    trainer.fit(Slow(), Slow.loader())
    spans = trainer.strategy.timeline.spans  # type: ignore[attr-defined]
    forwards = [span for span in spans if span.kind == "forward" and span.microbatch == 0]
    backwards = [span for span in spans if span.kind.startswith("backward")]
    first = max(span.start for span in forwards if span.chunk == 0)
    return first, max(span.end for span in backwards if span.end < first)


class Slow(Deep):
    """The gradients of the weights in its middle, on the first stage, take some time: that stage ends last."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():  # before the first batch, hooks on parameters are refused
            if batch_idx == 1 and name in ("net.4.0.weight", "net.5.0.weight"):
                parameter.register_hook(lambda gradient: time.sleep(0.02))


def test_the_stage_with_the_input_begins_the_next_batch_before_the_others_end_theirs(launch: Any) -> None:
    """In a V the first stage ends last, unless another program keeps the last one from a core: not in each run."""
    for _ in range(RUNS):
        (begun, _), (_, ended) = launch(begins_and_ends, 2, "zbv")  # the last stage, the first stage
        if begun < ended:
            break
    assert begun < ended
    (_, ended), (begun, _) = launch(begins_and_ends, 2, "1f1b")
    assert begun > ended
