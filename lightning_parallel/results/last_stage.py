"""Runs on the last stage what only that stage can run, and tells the other stages the results.

Only the last stage reaches the end of the user's steps. So the user's hooks that work on outputs of steps run only
there::

    hook                                 runs on       because it works on
    on_..._epoch_end                     last stage    what the steps gathered: a list of outputs, a metric
    on_validation_batch_end, ...         last stage    what the step returned
    on_train_batch_end                   all stages    perhaps the weights: a moving average

What an epoch's end sets, such as a learning rate, is set on the other stages too, and a hook that runs on one stage
must not change other stages' parameters (``hook_changes.py``).

The other stages get the loss (``late_values.py``), but nothing else that ``training_step`` returned. Collectives of
code that runs on one stage only are over its replicas. A save of a checkpoint there is refused: all ranks take part.

Callbacks run on every rank and read metrics there. One that decides differently on one rank (a checkpoint's monitor,
early stopping) would make the others wait forever. So the last stage alone logs, and publishes what it logged; the
other stages put it where Lightning's callbacks look::

    when                             who reads it
    a step after which a             ModelCheckpoint(every_n_train_steps)
    checkpoint reads a metric
    end of a training epoch          EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
    end of validation, test          the same, and the caller of trainer.validate()

In between, metrics of steps are awaited when they are read (``late_values.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_parallel.private.lightning.batches import time_without_broadcasts
from lightning_parallel.private.lightning.launching import callbacks_of
from lightning_parallel.private.lightning.metrics import (
    evaluation_outputs,
    metrics_of_no_loader,
    reads_training_metric,
)
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.ranks.collectives import broadcast_object
from lightning_parallel.ranks.run import Run
from lightning_parallel.results import hook_changes
from lightning_parallel.results.late_values import Outcomes
from lightning_parallel.results.logs import discard
from lightning_parallel.seeding import Generators, mix

EPOCH_END_HOOKS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")
OUTPUT_HOOKS = ("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")
WRAPPED_HOOKS = (*EPOCH_END_HOOKS, *OUTPUT_HOOKS, "on_train_batch_end")
PUBLISHING_HOOKS = ("on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")


class LastStage:
    """The last stage of a pipeline, as this rank sees it.

    Args:
        shared: the parameters that this stage and others have, by name.
        drain: finishes what stages have begun of later batches. It is called before they meet after a batch or an
            epoch of training.
        failed: called with an exception, before other callbacks see it.
    """

    def __init__(
        self,
        run: Run,
        *,
        shared: Mapping[str, nn.Parameter],
        drain: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._run, self._trainer, self._layout = run, run.trainer, run.layout
        self._drain, self._shared = drain, shared
        self._by_user = {name for name in WRAPPED_HOOKS if is_overridden(name, run.module)}
        self._spreading = self._by_user.intersection(EPOCH_END_HOOKS)
        self._generators = Generators(run.device)
        self.outcomes = Outcomes(run)
        self._put_back = ExitStack()
        self._put_back.callback(time_without_broadcasts(run.trainer))
        # It runs before all other callbacks: when they read metrics at the end of an epoch, every stage has them. After
        # an error one of them may want to save a checkpoint, for which all ranks would meet.
        hooks = {hook: functools.partial(self._publish, hook) for hook in PUBLISHING_HOOKS}
        self._publisher = LambdaCallback(**hooks, on_exception=lambda trainer, module, error: failed(error))
        if run.layout.stages > 1:
            for name in WRAPPED_HOOKS:
                hook = functools.partial(self._run_hook, name, getattr(run.module, name) or discard)
                self._put_back.callback(replaced(run.module, name, hook))
            callbacks_of(run.trainer).insert(0, self._publisher)
        # On the other stages a step doesn't reach its end, and a value that a hook computes (a norm of gradients) may
        # differ from the last stage's.
        if not run.layout.is_last_stage:
            self._put_back.callback(replaced(run.module, "log", discard))

    def end(self) -> None:
        """Give the module back its own hooks and its ``log``."""
        self._put_back.close()
        self.outcomes.end()
        if self._publisher in callbacks_of(self._trainer):
            callbacks_of(self._trainer).remove(self._publisher)

    # -- code that runs on the last stage only -------------------------------------------------------------------

    @contextmanager
    def alone(self, name: str, *indices: int) -> Iterator[None]:
        """Inside, the user's code may run on the last stage only, sees the ranks of the data axis, and draws random
        numbers of its own. They depend on the run, the replica, the update and ``indices``. ``name`` is that of the
        hook or step, for errors."""
        seed = mix(self._run.seed, self._layout.index("data"), self._trainer.global_step, *indices)
        with self._run.collectives.inside_step(name), self._generators.seeded(seed):
            yield

    def _run_hook(self, name: str, hook: Callable[..., Any], *args: Any) -> None:
        """Run the user's hook on the results of its steps on the last stage, which has them."""
        if name == "on_train_batch_end":
            outputs, *rest = args
            hook(outputs if self._layout.is_last_stage else _LossOnly(outputs or {}), *rest)
            self.outcomes.take(keep=self._run.ahead())
            return
        module, optimizers = self._run.module, self._trainer.optimizers
        spreads = name in self._spreading and self._run.trains
        changes: hook_changes.Settings = {}
        if self._layout.is_last_stage:
            before = hook_changes.settings_of(module, optimizers) if spreads else {}
            is_users = name in self._by_user
            checked = hook_changes.only_own_changed(name, module, self._shared) if is_users else nullcontext()
            with self.alone(name), checked:
                hook(*args)
            changes = hook_changes.changed(before, hook_changes.settings_of(module, optimizers)) if spreads else {}
        if name not in OUTPUT_HOOKS:
            self._publish(name)
        if spreads:
            group = self._run.groups.along("pipeline")
            changes = broadcast_object(changes, self._run.last_rank, group)
            if not self._layout.is_last_stage:
                hook_changes.make(changes, module, optimizers)

    # -- metrics -------------------------------------------------------------------------------------------------

    def _publish(self, hook: str, *_: Any) -> None:
        trainer = self._trainer
        # After a batch only if a checkpoint will be saved, by a metric that a hook may have logged.
        if hook == "on_train_batch_end" and not any(
            reads_training_metric(callback, trainer.global_step) for callback in trainer.checkpoint_callbacks
        ):
            return
        if hook in ("on_train_batch_end", "on_train_epoch_end"):
            self._drain()
        if self._run.trains:
            self.outcomes.take(keep=0)  # all stages meet here
        if hook != "on_predict_epoch_end":
            _share_metrics(self._run, evaluation=hook in ("on_validation_epoch_end", "on_test_epoch_end"))


def _share_metrics(run: Run, *, evaluation: bool) -> None:
    """Publish all metrics that the trainer has on the last stage to the other stages, at a point where all stages meet.
    At the end of an evaluation also what ``trainer.validate()`` is going to return. A collective."""
    trainer, is_source = run.trainer, run.layout.is_last_stage
    outputs = evaluation_outputs(trainer) if evaluation else []
    own: list[dict[str, Any]] = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
    sent = None
    if is_source:
        rest = metrics_of_no_loader(trainer) if evaluation else {}
        # Copies that can be pickled by themselves: a view would take the whole of its tensor along.
        sent = apply_to_collection(
            [*own, *({**output, **rest} for output in outputs)], Tensor, lambda metric: metric.detach().cpu().clone()
        )
    metrics = broadcast_object(sent, run.last_rank, run.groups.along("pipeline"))
    if not is_source:
        for place, values in zip([*own, *outputs], metrics, strict=True):
            place.update(move_data_to_device(values, run.device))


class _LossOnly(dict[str, Any]):
    """The output of ``training_step`` on a stage that isn't the last: the loss alone."""

    def __missing__(self, key: str) -> Any:
        raise RuntimeError(
            f"on_train_batch_end looks at {key!r} of what training_step returned, which exists on the last pipeline "
            f"stage only (global rank 0). Do this in training_step, or under `if self.trainer.is_global_zero:`."
        )
