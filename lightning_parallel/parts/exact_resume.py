"""Makes a resumed run go on with what would have come next: the rest of its batch, the samples, the random numbers.

Lightning's checkpoints lack what is on the left; this callback adds it::

    the moment         A run is saved inside a batch, at its end, at the end of a validation, between two batches, or at
                       the end of an epoch (:class:`.SavedMoment`). Lightning guesses from its counters, and leaves out
                       what would have followed: a validation that was due, steps of plateau schedulers.
    metrics            What was logged, which those schedulers, callbacks, and the end of the run read; the sums over
                       the epoch that ``self.log(on_epoch=True)`` has begun, for each replica.
    generators         A directory checkpoint has those of each rank. Under Lightning's own strategies rank 0 writes the
                       file, so it gathers them. They are put back when the module has made its loaders, which may
                       draw, such as a split of the data: it has to be the same one. And once more after all that
                       draws at the start of a run: before the next batch is loaded, or the next epoch begins.
    states of loaders  Lightning saves those of rank 0. Here rank 0 gathers one for each replica.
    names              Lightning numbers the optimizers' parameters. With their names a file can be made a directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.checkpoint.plain import OPTIMIZER_NAMES, RANDOM_STATES
from lightning_parallel.checkpoint.random_state import RANDOM_STATE, random_state, restore_random_state
from lightning_parallel.layout import Layout
from lightning_parallel.lightning_private import (
    ContinuedSums,
    before_first_batch,
    before_loaders_begin,
    begin_batch_again,
    callbacks_of,
    end_replacements,
    epoch_sums,
    finish_batch,
    finish_epoch,
    in_mid_epoch,
    let_the_last_step_finish,
    restart_nothing,
    restore_metrics,
)
from lightning_parallel.parts.by_replica import by_replica, gathered, replicas_and_own, warn_of_absent
from lightning_parallel.parts.saved_moment import (
    SavedMoment,
    count_as_completed,
    count_as_not_begun,
    is_in_step,
    is_to_stop,
    say_that_it_stops,
    warn_of_gradients,
    warn_of_repetition,
)
from lightning_parallel.parts.searches import is_of_search, refuse_searches
from lightning_parallel.resumable_loader import ResumableDataLoader
from lightning_parallel.torch_private import tree_leaves

_PROGRESS = "exact_resume"  # in any checkpoint
_OF_LOADERS = "loader_states"  # in any checkpoint: by replica
_LIGHTNINGS = "combined_loader"  # of Lightning's


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a checkpoint holds for this rank, kept until the run has begun."""

    moment: SavedMoment | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    random_state: Mapping[str, Any] = field(default_factory=dict)
    was_to_stop: bool = False

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], replicas: int, own: int) -> _Loaded:
        """This rank's part of a checkpoint. Sums are saved by replica, and so are generators under Lightning's own
        strategies."""
        states = checkpoint.get(RANDOM_STATES, [])
        state = checkpoint.get(RANDOM_STATE) or (states[own] if own < len(states) else {})
        if (saved := checkpoint.get(_PROGRESS)) is None:  # without this callback
            return cls(random_state=state)
        sums = saved["sums"][own] if len(saved["sums"]) == replicas else {}
        return cls(SavedMoment(saved["moment"]), saved["metrics"], sums, state, saved["should_stop"])


class ExactResume(Callback):
    """Saves the moment of the save, the metrics, the states of torch's, NumPy's and Python's generators, and of each
    replica's data loaders that have one (:class:`.ResumableDataLoader`). A run that is resumed gets those of its
    replica back; under another number of replicas, the place in the data is the first one's.

    The strategies of this package bring this callback along. With Lightning's own, pass it to the Trainer::

        Trainer(strategy="ddp", callbacks=[ExactResume()])
    """

    def __init__(self) -> None:
        self._loaded = _Loaded()
        self._continued: ContinuedSums | None = None
        self._has_validated = False
        self._has_failed = False
        self._next_epoch: Mapping[str, Any] = {}  # generators

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._has_failed = False
        # The first, so that it knows of a hook before another callback saves there. A list of its own: the Trainer
        # goes through the one that it has.
        others = [callback for callback in callbacks_of(trainer) if callback is not self]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_validated = False

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_validated = True

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        moment = SavedMoment.of(trainer, self._has_validated)
        warn_of_gradients(trainer, moment)
        warn_of_repetition(trainer, moment)
        warn_of_absent(trainer, self._has_failed)
        if not _saves_by_itself(trainer):
            checkpoint[RANDOM_STATES] = gathered(random_state(), trainer, self._has_failed)
            checkpoint[OPTIMIZER_NAMES] = [_parameter_names(pl_module, optimizer) for optimizer in trainer.optimizers]
        loaders = _loaders(checkpoint).get(_LIGHTNINGS)
        if loaders:
            _loaders(checkpoint)[_LIGHTNINGS] = loaders = _with_what_comes_next(trainer, loaders)
        replicas, own = replicas_and_own(trainer)
        sums = epoch_sums(trainer) if moment.is_in_epoch and not is_in_step(trainer) else {}
        ranks = gathered((own, loaders, sums), trainer, self._has_failed)
        loaders_by_replica, sums_by_replica = by_replica(ranks)
        if replicas > 1:
            checkpoint[_OF_LOADERS] = loaders_by_replica
        metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
        checkpoint[_PROGRESS] = {
            "moment": str(moment), "metrics": metrics, "sums": sums_by_replica, "should_stop": is_to_stop(trainer)
        }  # fmt: skip

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        replicas, own = replicas_and_own(trainer)
        loaders = checkpoint.get(_OF_LOADERS, [])
        if len(loaders) == replicas and loaders[own]:
            _loaders(checkpoint)[_LIGHTNINGS] = loaders[own]
        if trainer.state.fn != TrainerFn.FITTING or is_of_search(trainer):
            return
        refuse_searches(trainer)
        self._loaded = loaded = _Loaded.of(checkpoint, replicas, own)
        before_loaders_begin(trainer, partial(restore_random_state, loaded.random_state))
        # What this callback does when the run begins counts as done: otherwise Lightning leaves it out.
        counters = checkpoint["loops"]["fit_loop"]
        if loaded.moment in (SavedMoment.TRAINED, SavedMoment.VALIDATED, SavedMoment.BETWEEN):
            count_as_completed(counters["epoch_loop.batch_progress"])
        elif loaded.moment is SavedMoment.EPOCH:
            count_as_completed(counters["epoch_progress"])
        elif loaded.moment is SavedMoment.INSIDE:
            count_as_not_begun(counters["epoch_loop.batch_progress"])
        if loaded.moment in (SavedMoment.TRAINED, SavedMoment.VALIDATED):
            let_the_last_step_finish(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaded, self._loaded = self._loaded, _Loaded()
        if in_mid_epoch(trainer):
            before_first_batch(trainer, partial(restore_random_state, loaded.random_state))
        restore_metrics(trainer, loaded.metrics)
        if loaded.was_to_stop:
            say_that_it_stops()
        if loaded.sums:
            self._continued = ContinuedSums(trainer, loaded.sums)
        match loaded.moment:
            case SavedMoment.TRAINED | SavedMoment.VALIDATED:
                rest = {"validated": loaded.moment is SavedMoment.VALIDATED, "should_stop": loaded.was_to_stop}
                before_first_batch(trainer, partial(finish_batch, trainer, **rest))
            case SavedMoment.INSIDE:
                before_first_batch(trainer, partial(begin_batch_again, trainer, should_stop=loaded.was_to_stop))
            case SavedMoment.BETWEEN:
                trainer.should_stop |= loaded.was_to_stop
                before_first_batch(trainer, partial(restart_nothing, trainer))
            case SavedMoment.EPOCH | SavedMoment.OVER:
                finish_epoch(trainer, stepped=loaded.moment is SavedMoment.OVER)
                restart_nothing(trainer)
                if trainer.current_epoch > 0:  # before the first one, the loaders have yet to draw
                    self._next_epoch = loaded.random_state
                trainer.should_stop |= loaded.was_to_stop  # unless min_epochs or min_steps say otherwise

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._next_epoch:
            restore_random_state(self._next_epoch)
        self._next_epoch = {}

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_sums(logs=_logs(trainer))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._has_failed = True
        self._end_sums(logs=False)
        self._loaded = _Loaded()
        end_replacements(trainer)  # or the next run of this Trainer would go on as this one

    def _end_sums(self, *, logs: bool) -> None:
        if self._continued is not None:
            self._continued.end(logs=logs)
        self._continued = None

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        restore_metrics(trainer, self._loaded.metrics)  # still here if nothing was left to train
        self._loaded = _Loaded()
        end_replacements(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"of": "generators"}  # only callbacks with a state are asked to load it


def _loaders(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The place in a checkpoint that holds the states of loaders, under :data:`_LIGHTNINGS`."""
    return checkpoint["loops"]["fit_loop"]["state_dict"]


def _with_what_comes_next(trainer: pl.Trainer, states: Sequence[Any]) -> list[Any]:
    """The states of loaders (Lightning has collected those of loaders that have one), with what comes next.

    After a save inside a batch, before its update, the resumed run begins with this batch, so loaders give it once
    more. A loader that has ended before longer ones gives nothing more in this epoch. Where a shorter loader ends the
    epoch, the rest of a longer one is left out.
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


def _logs(trainer: pl.Trainer) -> bool:
    """Does this rank log what a step logs?"""
    layout = getattr(trainer.strategy, "layout", None)
    return layout.is_last_stage if isinstance(layout, Layout) else True


def _parameter_names(module: pl.LightningModule, optimizer: Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, by group."""
    names = {parameter: name for name, parameter in reversed([*module.named_parameters(remove_duplicate=False)])}
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def _saves_by_itself(trainer: pl.Trainer) -> bool:
    return getattr(trainer.strategy, "saves_random_states", False)
