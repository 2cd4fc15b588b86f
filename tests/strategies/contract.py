"""One row of the contract: a model trained under a layout, and by one process, and what both have to say of it.

All of it is done as a user would: a strategy for a Trainer, hooks, callbacks, checkpoints. Gradients and weights are
read where a user could read them whole: in a checkpoint that one process has loaded. So the contract stands, however
the library is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_parallel as lp
from tests.strategies.contract_models import MODELS, loader
from tests.strategies.harness import Losses, make_trainer, spoil

EXACT = 1e-11  # float64
EPOCHS, SAVED = 3, 2  # epochs in all, and in the first of two runs


@dataclass(frozen=True)
class Layout:
    """Args:
    strategy: of the library.
    ranks: processes.
    devices: of this process, where replicas are threads.
    trainer: options of every run to compare, that in one process too.
    """

    strategy: Callable[..., Any]
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    devices: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> dict[str, Any]:
        """The Trainer's arguments."""
        return {"strategy": self.strategy(**self.options), "devices": self.devices or self.ranks}


def staged(ranks: int = 2, microbatches: int = 3, **options: Any) -> Layout:
    """Batches of eight are 3, 3 and 2 samples."""
    return Layout(lp.PipelineStrategy, ranks, {"stages": 2, "microbatches": microbatches, **options})


LAYOUTS = {
    "replicas": Layout(lp.TensorParallelStrategy, 2, {"tensor_parallel": 1, "data_parallel": 2}),
    "threads": Layout(lp.DataParallelStrategy, 1, devices=2),
    "sharded": Layout(lp.FullyShardedStrategy),
    "tensor": Layout(lp.TensorParallelStrategy),
    "naive": staged(microbatches=1, schedule="naive"),
    "gpipe": staged(3, stages=3, schedule="gpipe"),
    "1f1b": staged(schedule="1f1b"),
    "interleaved": staged(microbatches=4, schedule="interleaved"),
    "zbv": staged(microbatches=4, schedule="zbv"),
    "vmin": staged(3, microbatches=4, stages=3, schedule="vmin"),
    "pipeline x data": staged(4, data_parallel=2),
    "pipeline x sharded": staged(4, data_parallel=2, data_parallel_kind="fully_shard"),
    "pipeline x tensor": staged(4, tensor_parallel=2),
    # It drains for an evaluation: after one in each batch, no gradient is late. Those that are late are compared with
    # delayed gradients in test_pipeline_async.py.
    "async": Layout(lp.AsyncPipelineStrategy, 2, {"microbatches": 3}, trainer={"val_check_interval": 1}),
    "async in a V": Layout(
        lp.AsyncPipelineStrategy, 2, {"microbatches": 4, "schedule": "vhalf"}, trainer={"val_check_interval": 1}
    ),
}


# Arguments of the model, and options of the Trainer. Everywhere: a learning rate that a scheduler changes, a last batch
# with fewer samples, an evaluation at the end.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({}, {"accumulate_grad_batches": 2}),  # of an epoch's three batches
    "clipping by norm": ({}, {"gradient_clip_val": 0.05}),
    "clipping by value": ({}, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    "groups": ({"groups": True}, {}),
    "early optimizer": ({"early": True}, {"val_check_interval": 2}),  # and an evaluation in the middle of an epoch
    "all": ({"groups": True}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "val_check_interval": 2}),
}


@dataclass
class Report:
    """What one rank has seen of a run."""

    replica: int = 0
    losses: list[float] = field(default_factory=list)  # as training_step returned them
    logged: list[tuple[str, dict[str, float]]] = field(default_factory=list)  # callback_metrics, at some moments

    def __add__(self, later: Report) -> Report:
        return Report(self.replica, self.losses + later.losses, self.logged + later.logged)


Record = dict[str, Tensor]
Run = tuple[Report, Record]  # of one process


class Witness(Losses):
    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.note(f"validation in batch {trainer.fit_loop.total_batch_idx}", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.note(f"end of epoch {trainer.current_epoch}", trainer)

    def note(self, moment: str, trainer: L.Trainer) -> None:
        self.report.logged.append((moment, {name: float(value) for name, value in trainer.callback_metrics.items()}))


@dataclass
class Row:
    model: str
    layout: str
    feature: str
    callback: Callback | None = None
    resumes: bool = True  # under the layout, too, and not in one process only

    @property
    def reference(self) -> tuple[str, str, str]:
        """What its numbers are compared with."""
        return self.model, self.feature, repr(LAYOUTS[self.layout].trainer)


def fit(
    row: Row, layout: Layout | None, epochs: int, resume: Path | None = None, save: Path | None = None
) -> tuple[Report, L.Trainer]:
    """``layout``: None is one process, with Lightning alone. A module to be resumed is made with other weights."""
    arguments, options = FEATURES[row.feature]
    module = MODELS[row.model](**arguments)
    if resume is not None:
        spoil(module)
    witness = Witness(Report())
    callbacks = [*([row.callback] if row.callback else []), witness]
    given = {**(layout() if layout else {}), **options, **LAYOUTS[row.layout].trainer}
    trainer = make_trainer("single", callbacks, {}, max_epochs=epochs, **given)
    share = trainer.distributed_sampler_kwargs or {}
    share = share if share.get("num_replicas", 1) > 1 else {}
    trainer.fit(module, loader(share), loader(share), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    if epochs == EPOCHS:
        witness.note("after the run", trainer)
    witness.report.replica = share.get("rank", 0)
    return witness.report, trainer


def under_layout(row: Row, folder: Path) -> Report:
    """On every rank: a run, and one that goes on from its checkpoint, if the row has it."""
    layout = LAYOUTS[row.layout]
    first, _ = fit(row, layout, SAVED, save=folder / "first.ckpt")
    if not row.resumes:
        return first
    second, _ = fit(row, layout, EPOCHS, resume=folder / "first.ckpt", save=folder / "second.ckpt")
    return first + second


def in_one_process(row: Row) -> Run:
    """A run that isn't interrupted."""
    report, trainer = fit(row, None, EPOCHS)
    return report, record_of(trainer)


def from_checkpoints(row: Row, folder: Path) -> list[Run]:
    """In one process: training goes on from the first one, and the second is read, if there is one."""
    saved = ("first", "second") if row.resumes else ("first",)
    runs = [fit(row, None, EPOCHS, resume=folder / f"{name}.ckpt") for name in saved]
    return [(report, record_of(trainer)) for report, trainer in runs]


def record_of(trainer: L.Trainer) -> Record:
    """The weights, and the optimizers' states: moments, and each gradient before its update."""
    names = {parameter: name for name, parameter in trainer.lightning_module.named_parameters()}
    record = {name: parameter.detach().clone() for parameter, name in names.items()}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            record |= {f"{names[parameter]} {key}": value for key, value in state.items()}
    return record


# -- comparison ------------------------------------------------------------------------------------------------------


def differences(expected: Run, ranks: list[Report], resumed: list[Run]) -> list[str]:
    """In words, between one process and the ranks of a layout, and what one process has made of its checkpoints. Ranks
    that haven't gone on from the first one are compared as far as they have come."""
    whole, record = expected
    found, reached = list[str](), whole
    if len(resumed) == 1:
        batches = len(whole.losses) - len(resumed[0][0].losses)
        moments = [moment for moment, _ in whole.logged].index(f"end of epoch {SAVED - 1}") + 1
        reached = Report(whole.replica, whole.losses[:batches], whole.logged[:moments])
    replicas = {report.replica: report.losses for report in ranks}
    for rank, report in enumerate(ranks):
        found += unequal(f"rank {rank}'s losses", report.losses, replicas[report.replica])
        found += unequal_logs(f"rank {rank}", report.logged, reached.logged)
    means = [sum(losses) / len(losses) for losses in zip(*replicas.values(), strict=True)]
    found += unequal("losses", means, reached.losses)
    for name, (report, other) in zip(("continued", "loaded"), resumed, strict=False):
        count = len(report.losses)
        found += unequal(f"{name}: losses", report.losses, whole.losses[len(whole.losses) - count :])
        found += [f"{name}: {key} in one only" for key in sorted(record.keys() ^ other.keys())]
        for key in sorted(record.keys() & other.keys()):
            difference = float((record[key] - other[key]).abs().max())
            if not difference <= EXACT:
                found.append(f"{name}: {key} differs by {difference:.1e}")
    return found


def unequal(what: str, found: list[float], expected: list[float]) -> list[str]:
    close = len(found) == len(expected) and all(abs(a - b) <= EXACT for a, b in zip(found, expected, strict=True))
    return [] if close else [f"{what}: {found} for {expected}"]


def unequal_logs(who: str, found: list[Any], expected: list[Any]) -> list[str]:
    if [moment for moment, _ in found] != [moment for moment, _ in expected]:
        return [f"{who} logged at {[moment for moment, _ in found]}"]
    lines = list[str]()
    for (moment, mine), (_, theirs) in zip(found, expected, strict=True):
        lines += [f"{who}, {moment}: {name} in one only" for name in sorted(mine.keys() ^ theirs.keys())]
        for name in sorted(mine.keys() & theirs.keys()):
            lines += unequal(f"{who}, {moment}: {name}", [mine[name]], [theirs[name]])
    return lines
