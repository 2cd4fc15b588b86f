"""A resumed run goes on with the samples and the random numbers that would have come next.

Lightning leaves out of checkpoints::

    generators         A directory checkpoint has those of each rank. Under Lightning's own strategies rank 0 writes the
                       file, so it gathers them. They are put back when the checkpoint is read; in the middle of an
                       epoch once more right before the next batch is loaded, after all that draws at the start of a
                       run, such as loaders.
    states of loaders  It saves those of rank 0. Here rank 0 gathers one for each replica.
    names              It numbers the optimizers' parameters. With their names a file can be made a directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.checkpoint.plain import OPTIMIZER_NAMES, RANDOM_STATES
from lightning_parallel.checkpoint.random_state import RANDOM_STATE, random_state, restore_random_state
from lightning_parallel.collectives import gather_objects_on_first
from lightning_parallel.lightning_private import before_first_batch, in_mid_epoch
from lightning_parallel.resumable_loader import ResumableDataLoader
from lightning_parallel.torch_private import tree_leaves

_OF_LOADERS = "loader_states"  # in any checkpoint: by replica
_KEY = "combined_loader"  # of Lightning's


class ExactResume(Callback):
    """Saves the states of torch's, NumPy's and Python's generators, and of each replica's data loaders that have one
    (:class:`.ResumableDataLoader`). A run that is resumed gets those of its replica back; under another number of
    replicas, the place in the data is the first one's.

    The strategies of this package bring this callback along. With Lightning's own, pass it to the Trainer::

        Trainer(strategy="ddp", callbacks=[ExactResume()])
    """

    def __init__(self) -> None:
        self._state: Mapping[str, Any] = {}

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not _saves_by_itself(trainer):
            checkpoint[RANDOM_STATES] = _gathered(random_state(), trainer)
            checkpoint[OPTIMIZER_NAMES] = [_names(pl_module, optimizer) for optimizer in trainer.optimizers]
        if _loaders(checkpoint).get(_KEY):
            _loaders(checkpoint)[_KEY] = _states(trainer, _loaders(checkpoint)[_KEY])
        replicas, replica = _replica(trainer)
        if replicas > 1:
            states = _gathered((replica, _loaders(checkpoint).get(_KEY)), trainer)
            of_first_ranks = dict(reversed(states))  # by replica; empty on all ranks but the first
            checkpoint[_OF_LOADERS] = [of_first_ranks[i] for i in sorted(of_first_ranks)]

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

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if in_mid_epoch(trainer):
            before_first_batch(trainer, partial(restore_random_state, self._state))
        self._state = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"of": "generators"}  # only callbacks with a state are asked to load it


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


def _gathered(mine: Any, trainer: pl.Trainer) -> list[Any]:
    """What every rank has, by rank; on rank 0 only."""
    return (gather_objects_on_first(mine, None) or []) if trainer.world_size > 1 else [mine]


def _names(module: pl.LightningModule, optimizer: Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, by group."""
    names = {parameter: name for name, parameter in reversed([*module.named_parameters(remove_duplicate=False)])}
    return [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]


def _saves_by_itself(trainer: pl.Trainer) -> bool:
    return getattr(trainer.strategy, "saves_random_states", False)
