"""A resumed run goes on with what would have come next: the rest of its batch, the samples, the random numbers.

Lightning leaves out of checkpoints::

    moments            A run is saved inside a batch, at its end, at the end of a validation, between two batches, or at
                       the end of an epoch (:class:`_Moment`). Lightning guesses from its counters, and leaves out what
                       would have followed: a validation that was due, steps of plateau schedulers.
    metrics            What was logged before, which those schedulers, callbacks, and the end of the run read; sums
                       over the epoch that ``self.log(on_epoch=True)`` has begun, a replica's own.

    generators         A directory checkpoint has those of each rank. Under Lightning's own strategies rank 0 writes the
                       file, so it gathers them. They are put back when the checkpoint is read; in the middle of an
                       epoch once more right before the next batch is loaded, after all that draws at the start of a
                       run, such as loaders.
    states of loaders  It saves those of rank 0. Here rank 0 gathers one for each replica.
    names              It numbers the optimizers' parameters. With their names a file can be made a directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.checkpoint.plain import OPTIMIZER_NAMES, RANDOM_STATES
from lightning_parallel.checkpoint.random_state import RANDOM_STATE, random_state, restore_random_state
from lightning_parallel.collectives import gather_objects_on_first
from lightning_parallel.layout import Layout
from lightning_parallel.lightning_private import (
    ContinuedSums,
    before_first_batch,
    ends_update,
    epoch_sums,
    finish_batch,
    finish_epoch,
    in_mid_epoch,
    let_the_last_step_finish,
    restart_nothing,
    restore_metrics,
)
from lightning_parallel.resumable_loader import ResumableDataLoader
from lightning_parallel.torch_private import tree_leaves

_RESUMED = "exact_resume"  # in any checkpoint
_OF_LOADERS = "loader_states"  # in any checkpoint: by replica
_KEY = "combined_loader"  # of Lightning's


class _Moment(StrEnum):
    """When a run was saved: what it has done of a batch or an epoch, and what it does first when it is resumed."""

    INSIDE = "inside a batch"  # trains it
    TRAINED = "at the end of a batch"  # validates, if that is due
    VALIDATED = "at the end of a validation"
    BETWEEN = "between two batches"  # trains the next one
    EPOCH = "at the end of an epoch"  # its plateau schedulers
    OVER = "between two epochs"

    @property
    def is_in_epoch(self) -> bool:
        return self not in (_Moment.EPOCH, _Moment.OVER)

    @classmethod
    def of(cls, trainer: pl.Trainer, has_validated: bool) -> _Moment:
        """The one at which a run is.

        Args:
            trainer: of the run.
            has_validated: its last validation has come to its end.
        """
        epoch: Any = trainer.fit_loop.epoch_progress.current
        batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if trainer.validating and trainer.state.fn == TrainerFn.FITTING:
            return cls.VALIDATED if has_validated else cls.TRAINED
        if epoch.processed == epoch.ready:
            return cls.OVER if epoch.completed == epoch.ready else cls.EPOCH
        if batch.processed < batch.ready:
            return cls.INSIDE
        return cls.BETWEEN if batch.completed == batch.ready else cls.TRAINED


class ExactResume(Callback):
    """Saves the moment of the save, the metrics, the states of torch's, NumPy's and Python's generators, and of each
    replica's data loaders that have one (:class:`.ResumableDataLoader`). A run that is resumed gets those of its
    replica back; under another number of replicas, the place in the data is the first one's.

    The strategies of this package bring this callback along. With Lightning's own, pass it to the Trainer::

        Trainer(strategy="ddp", callbacks=[ExactResume()])
    """

    def __init__(self) -> None:
        self._state: Mapping[str, Any] = {}
        self._moment: _Moment | None = None  # of the checkpoint
        self._metrics: dict[str, Tensor] = {}
        self._sums: dict[str, dict[str, Any]] = {}
        self._continued: ContinuedSums | None = None
        self._has_validated = False

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_validated = False

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_validated = True  # ModelCheckpoint comes after other callbacks

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        moment = _Moment.of(trainer, self._has_validated)
        _warn_of_gradients(trainer, moment)
        metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
        checkpoint[_RESUMED] = {"moment": str(moment), "metrics": metrics}
        if not _saves_by_itself(trainer):
            checkpoint[RANDOM_STATES] = _gathered(random_state(), trainer)
            checkpoint[OPTIMIZER_NAMES] = [_names(pl_module, optimizer) for optimizer in trainer.optimizers]
        if _loaders(checkpoint).get(_KEY):
            _loaders(checkpoint)[_KEY] = _states(trainer, _loaders(checkpoint)[_KEY])
        replicas, replica = _replica(trainer)
        sums = epoch_sums(trainer) if moment.is_in_epoch and not _is_in_step(trainer) else {}
        ranks = _gathered((replica, _loaders(checkpoint).get(_KEY), sums), trainer)  # empty on all ranks but the first
        of_sums: dict[int, dict[str, Any]] = {}
        for number, _, own in ranks:
            of_sums.setdefault(number, {}).update(own)  # of a replica's stages, the last one logs
        checkpoint[_RESUMED]["sums"] = [of_sums[number] for number in sorted(of_sums)]
        if replicas > 1:
            of_first_ranks = {number: state for number, state, _ in reversed(ranks)}
            checkpoint[_OF_LOADERS] = [of_first_ranks[number] for number in sorted(of_first_ranks)]

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        loaders = checkpoint.get(_OF_LOADERS, [])
        replicas, replica = _replica(trainer)
        if len(loaders) == replicas and loaders[replica]:
            _loaders(checkpoint)[_KEY] = loaders[replica]
        states = checkpoint.get(RANDOM_STATES, [])  # by replica: under Lightning's strategies each rank is one
        self._state = checkpoint.get(RANDOM_STATE) or (states[replica] if replica < len(states) else {})
        if trainer.state.fn == TrainerFn.FITTING:
            restore_random_state(self._state)
            saved = checkpoint.get(_RESUMED)
            self._moment = _Moment(saved["moment"]) if saved else None
            self._metrics = saved["metrics"] if saved else {}
            self._sums = saved["sums"][replica] if saved and len(saved["sums"]) == replicas else {}
            self._take_counters(trainer, checkpoint["loops"]["fit_loop"])

    def _take_counters(self, trainer: pl.Trainer, counters: dict[str, Any]) -> None:
        """Count as done what this callback does when the run begins. Otherwise Lightning leaves it out."""
        if self._moment is _Moment.TRAINED:
            _complete(counters["epoch_loop.batch_progress"])
        elif self._moment is _Moment.EPOCH:
            _complete(counters["epoch_progress"])
        if self._moment in (_Moment.TRAINED, _Moment.VALIDATED):
            let_the_last_step_finish(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if in_mid_epoch(trainer):
            before_first_batch(trainer, partial(restore_random_state, self._state))
        self._state = {}
        restore_metrics(trainer, self._metrics)
        self._continued = ContinuedSums(trainer, self._sums) if self._sums else None
        self._sums = {}
        match self._moment:
            case _Moment.TRAINED | _Moment.VALIDATED:
                validated = self._moment is _Moment.VALIDATED
                before_first_batch(trainer, partial(finish_batch, trainer, validated=validated))
            case _Moment.BETWEEN:
                before_first_batch(trainer, partial(restart_nothing, trainer))
            case _Moment.EPOCH:
                finish_epoch(trainer)
                restart_nothing(trainer)
        self._moment = None

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_sums(logs=_logs(trainer))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_sums(logs=False)

    def _end_sums(self, *, logs: bool) -> None:
        if self._continued is not None:
            self._continued.end(logs=logs)
        self._continued = None

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._moment is not None:  # nothing was left to do
            restore_metrics(trainer, self._metrics)
        self._moment, self._metrics = None, {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"of": "generators"}  # only callbacks with a state are asked to load it


def _is_in_step(trainer: pl.Trainer) -> bool:
    """The batch, which will be trained once more, may have logged already."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batch.processed < batch.started)


def _warn_of_gradients(trainer: pl.Trainer, moment: _Moment) -> None:
    """Those that are accumulated aren't saved."""
    begun = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches  # batches of an update, before the last one
    lacks = begun > 0 if moment is _Moment.INSIDE else not ends_update(trainer)
    if lacks and moment.is_in_epoch:
        rank_zero_warn(
            "Saved in the middle of an update. Its gradients are in no checkpoint: a run resumed from this one differs "
            "in it. Save and validate after numbers of batches that are multiples of "
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}."
        )


def _complete(progress: Mapping[str, Any]) -> None:
    """What has been processed has been completed."""
    for counters in (progress["total"], progress["current"]):
        counters["completed"] = counters["processed"]


def _loaders(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Where a checkpoint has the states of loaders, under :data:`_KEY`."""
    return checkpoint["loops"]["fit_loop"]["state_dict"]


def _states(trainer: pl.Trainer, states: Sequence[Any]) -> list[Any]:
    """The states of loaders, of which Lightning has asked those that have one, with what comes next.

    Of a save from inside a batch, before its update, the resumed run begins with this batch, so loaders give it once
    more. One that has come to its end before longer ones gives nothing more in this epoch; where a shorter one ends the
    epoch, a loader's rest is left out.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    inside = progress["current"]["ready"] - progress["current"]["processed"]
    over = progress["is_last_batch"] and not inside
    loaders = [loader for loader in tree_leaves(trainer.train_dataloader) if hasattr(loader, "load_state_dict")]
    changed = []
    for loader, state in zip(loaders, states, strict=True):
        if isinstance(loader, ResumableDataLoader):
            place = state["place"] - (0 if loader.has_ended else inside)
            comes = "another epoch" if over else "nothing" if place == len(loader) else "the rest"
            state = {**state, "place": place, "next": comes}
        changed.append(state)
    return changed


def _replica(trainer: pl.Trainer) -> tuple[int, int]:
    """How many replicas there are, and which one this rank belongs to."""
    sampler = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return sampler["num_replicas"], sampler["rank"]


def _logs(trainer: pl.Trainer) -> bool:
    """Does this rank log what a step logs?"""
    layout = getattr(trainer.strategy, "layout", None)
    return layout.is_last_stage if isinstance(layout, Layout) else True


def _gathered(mine: Any, trainer: pl.Trainer) -> list[Any]:
    """What every rank has, by rank; on rank 0 only."""
    return (gather_objects_on_first(mine, None) or []) if trainer.world_size > 1 else [mine]


def _names(module: pl.LightningModule, optimizer: Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, by group."""
    names = {parameter: name for name, parameter in reversed([*module.named_parameters(remove_duplicate=False)])}
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def _saves_by_itself(trainer: pl.Trainer) -> bool:
    return getattr(trainer.strategy, "saves_random_states", False)
