"""What happens on the last stage alone, and what it means for the others.

Only the last stage reaches the end of the user's steps. So the user's hooks on what the steps made run there, and what
they and the steps log is published to the other stages (``metrics.py`` says when). Code that runs on one rank can't
meet the others: a collective there is refused before anything waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from typing_extensions import override

from lightning_parallel.pipeline.random import host_generators_kept, mix, seed_host_generators, seeded
from lightning_parallel.strategies.metrics import (
    OUTPUT_HOOKS,
    LossOnly,
    MetricBoard,
    PublishMetrics,
    discard,
    named_loss_of_peers,
    unwrap_hooks,
    wrap_hooks,
)
from lightning_parallel.strategies.staged import StagedStrategy


class LastStageStrategy(StagedStrategy):
    """A staged strategy whose last stage runs the hooks and logs for all."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._board: MetricBoard | None = None
        self._publisher = PublishMetrics(self._publish, self.on_exception)
        self._alone_in: str | None = None  # a hook or step that reaches its end on the last stage only

    @property
    def board(self) -> MetricBoard:
        assert self._board is not None
        return self._board

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self.layout.pipeline > 1:
            wrap_hooks(self._module(), self._last_stage_hook)
            _callbacks(trainer).insert(0, self._publisher)
        if not self.stage.is_last:
            self._module().log = discard  # type: ignore[method-assign]  # until teardown
        last = self.layout.rank_of(stage=self.layout.pipeline - 1)
        self._board = MetricBoard(trainer, self.groups.pipeline, last, self.root_device)

    # -- hooks ---------------------------------------------------------------------------------------------------

    def _last_stage_hook(self, name: str, hook: Callable[..., Any], *args: Any) -> None:
        """The user's hook on what the steps made: on the last stage, which has it."""
        if name == "on_train_batch_end":
            outputs, *rest = args
            hook(outputs if self.stage.is_last else LossOnly(outputs or {}), *rest)
            return
        if self.stage.is_last:
            with self._alone(name):
                hook(*args)
        if name not in OUTPUT_HOOKS:
            self._publish(name)

    @contextlib.contextmanager
    def _alone(self, name: str, *indices: int) -> Iterator[None]:
        """Inside, the user's code may run on the last stage only, and draws numbers of its own."""
        seed = mix(self.seed, self.layout.data_rank, self._module().trainer.global_step, *indices)
        with self._apart(name), seeded(seed, self.root_device):
            seed_host_generators(seed)
            yield

    @contextlib.contextmanager
    def _apart(self, name: str) -> Iterator[None]:
        """Inside, the user's code can't meet the other ranks, and what it draws on the host must not move the
        generators that the data come from."""
        self._alone_in = name
        try:
            with host_generators_kept():
                yield
        finally:
            self._alone_in = None

    # -- metrics -------------------------------------------------------------------------------------------------

    def _publish(self, hook: str) -> None:
        if hook == "on_train_epoch_end":
            self.board.publish()
        elif hook in ("on_validation_epoch_end", "on_test_epoch_end"):
            self.board.publish_evaluation()
        elif hook == "on_train_batch_end" and self.read_after_this_batch():
            self.board.publish()

    def read_after_this_batch(self) -> bool:
        """Does a callback or a scheduler of Lightning's read a training metric now, and act on it?"""
        trainer = self._module().trainer
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
                every = callback._every_n_train_steps
                if every >= 1 and trainer.global_step % every == 0:
                    return True
                if callback._train_time_interval is not None:
                    return True
        batch_number = trainer.fit_loop.epoch_loop.batch_idx + 1
        return any(
            config.reduce_on_plateau and config.interval == "step" and batch_number % config.frequency == 0
            for config in self.lr_scheduler_configs
        )

    # -- collectives ---------------------------------------------------------------------------------------------

    def _meet(self, what: str) -> None:
        if self._alone_in is not None and self.layout.pipeline > 1:
            raise RuntimeError(
                f"{what} needs every rank, but {self._alone_in} reaches its end on the last pipeline stage only (rank "
                f"{self.layout.rank_of(stage=self.layout.pipeline - 1)}): what it works on exists there alone. Do this "
                f"in on_train_batch_end, or in a callback."
            )

    @override
    def barrier(self, name: str | None = None) -> None:
        self._meet("A barrier")
        with named_loss_of_peers():
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._alone_in is not None and src == self.global_rank:
            return obj  # trainer.log_dir is one
        self._meet("A broadcast")
        with named_loss_of_peers():
            return super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._meet("A decision of all ranks")
        with named_loss_of_peers():
            return super().reduce_boolean_decision(decision, all)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._meet("A checkpoint")
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        if self._stage is not None:
            unwrap_hooks(self._module())
            self._module().__dict__.pop("log", None)
            trainer = self._module()._trainer
            if trainer is not None and self._publisher in _callbacks(trainer):
                _callbacks(trainer).remove(self._publisher)
        super().teardown()


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]  # set by a connector, so untyped
