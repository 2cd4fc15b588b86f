"""Every private name of Lightning and torchmetrics that the package uses, with the reason why no public one does.

``tests/test_lightning_private.py`` pins each of them: when a new version of Lightning breaks one, a test there fails
and says what depends on it. Nothing else in the package imports or reads a private name of Lightning.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.io import torch_io
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.cloud_io import _atomic_save, _load
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

S = TypeVar("S", bound=type[Strategy])


# -- launching ---------------------------------------------------------------------------------------------------


def launched_by_make_launcher(strategy: S) -> S:
    """Class decorator: where Lightning calls the private hook ``_configure_launcher``, ``make_launcher()`` is called.

    It is the last call while a Trainer is made, so it is also the place to refuse what is known by then. This includes
    ``sync_batchnorm``: Lightning hands its plugin to strategies that have the private attribute ``_layer_sync``
    (:func:`layer_sync_of`).
    """

    def _configure_launcher(self: Any) -> None:
        self._launcher = self.make_launcher()

    strategy._configure_launcher = _configure_launcher  # type: ignore[method-assign]
    strategy._layer_sync = None  # type: ignore[attr-defined]
    return strategy


def script_launcher(environment: ClusterEnvironment, processes: int, nodes: int) -> Any:
    """What starts a script once more for each further process, as Lightning's own strategies do."""
    return _SubprocessScriptLauncher(environment, processes, nodes)


def init_process_group(environment: ClusterEnvironment, backend: str, timeout: timedelta, **options: Any) -> None:
    """Join the default process group that a cluster environment describes. Lightning's function also sets the
    environment's rendezvous variables and logs the start."""
    _init_dist_connection(environment, backend, timeout=timeout, **options)


def layer_sync_of(strategy: Strategy) -> Any | None:
    """The plugin that ``Trainer(sync_batchnorm=True)`` gives to a strategy; None for none."""
    return getattr(strategy, "_layer_sync", None)


# -- the strategy's tools ----------------------------------------------------------------------------------------


def move_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the state of optimizers to a device."""
    _optimizers_to_device(list(optimizers), device)


def say_device(module: pl.LightningModule, device: torch.device) -> None:
    """Set what ``module.device`` returns. Publicly only ``module.to(device)`` does, which moves the module."""
    _update_properties(module, device=device)


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The module's Trainer, or None. ``module.trainer`` raises where there is none."""
    return module._trainer


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """The list of a Trainer's callbacks, to add to and to remove from. A connector sets it, so it is not typed."""
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


# -- signals -----------------------------------------------------------------------------------------------------

Handler = Callable[[int, Any], None]


def take_signals(trainer: pl.Trainer, numbers: Sequence[signal.Signals], received: Handler) -> None:
    """In the next run of a Trainer, ``received`` gets these signals in the place of Lightning's handlers: these make a
    collective, or save, wherever the process happens to be. The end of the run puts back what was there before.

    A handler of the user's own for SIGTERM runs after ``received``; another signal that has one is left to it.
    """
    connector = trainer._signal_connector

    def register() -> None:
        del connector.register_signal_handlers
        own = {number: signal.getsignal(number) for number in numbers}
        connector.register_signal_handlers()
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in own.items():
            if not callable(handler):
                signal.signal(number, received)
            elif number is signal.SIGTERM:
                signal.signal(number, partial(both, handler))

    def both(own: Callable[[int, Any], Any], number: int, frame: Any) -> None:
        received(number, frame)
        own(number, frame)

    connector.register_signal_handlers = register  # type: ignore[method-assign]


def say_terminated(trainer: pl.Trainer) -> None:
    """Let ``trainer.received_sigterm`` be true."""
    trainer._signal_connector.received_sigterm = True


def requeue_by_slurm(trainer: pl.Trainer, number: int) -> bool:
    """If Lightning is to requeue the SLURM job at this signal, let it: it saves, and asks SLURM. All ranks call it.

    Returns:
        Whether it was.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return False
    if number != (environment.requeue_signal or signal.SIGUSR1):
        return False
    trainer._signal_connector._slurm_sigusr_handler_fn(number, None)  # type: ignore[arg-type]
    return True


# -- between two batches -----------------------------------------------------------------------------------------


def before_each_batch(trainer: pl.Trainer, call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call()`` called before each training batch, after all that belongs to the one before: its hooks,
    schedulers and validation. Lightning's own broadcast there is left out, by which rank 0 tells of a SIGTERM.

    Returns:
        What ends it.
    """
    loop = trainer.fit_loop.epoch_loop

    def advance(fetcher: Any) -> None:
        call()
        type(loop).advance(loop, fetcher)

    loop.advance = advance  # type: ignore[method-assign, assignment]
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def put_back() -> None:
        del loop.advance, loop._broadcast_sigterm_tensor

    return put_back


def before_first_batch(trainer: pl.Trainer, call: Callable[[], None]) -> None:
    """Have ``call()`` called once, right before the first batch of the run is loaded."""
    loop = trainer.fit_loop.epoch_loop
    others = vars(loop).get("on_run_start")

    def once(fetcher: Any) -> None:
        if others is None:
            del loop.on_run_start
            loop.on_run_start(fetcher)
        else:
            others(fetcher)
        call()

    loop.on_run_start = once  # type: ignore[method-assign, assignment]


def restart_nothing(trainer: pl.Trainer) -> None:
    """Have the loops take what they have loaded for the state between two batches, or between two epochs. Lightning
    takes it for that in a validation, or at an epoch's end, and would do once more what comes after it, and leave
    plateau schedulers out of the epoch."""
    trainer.fit_loop._restarting = False  # its setter makes it true where the length is given in steps
    trainer.fit_loop.epoch_loop.restarting = False
    trainer.fit_loop.epoch_loop.reset_restart_stage()


def finish_batch(trainer: pl.Trainer, *, validated: bool) -> None:
    """The run has been saved when a batch had been trained: do the rest of it before the next one is loaded. That is
    the validation that is due, schedulers, and counters. Called before the first batch.

    Args:
        trainer: that has loaded the loops' state.
        validated: the run has been saved at the end of the validation.
    """
    loop = trainer.fit_loop.epoch_loop
    others = vars(loop).get("advance")

    def advance(fetcher: Any) -> None:
        if others is None:
            del loop.advance
        else:
            loop.advance = others  # type: ignore[method-assign]
        restart_nothing(trainer)
        loop._skip_next_val = validated
        # No batch is trained. What Lightning does after one finishes the last one.

    loop.advance = advance  # type: ignore[method-assign, assignment]


def let_the_last_step_finish(trainer: pl.Trainer) -> None:
    """A run of so many steps, saved in the last one, is loaded: train nothing, but do not leave before
    :func:`finish_batch`. Called before the loops run."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop

    def run() -> None:
        del fit.run
        steps = loop.max_steps
        if loop.global_step != steps:
            fit.run()
            return

        def on_run_start(fetcher: Any) -> None:
            loop.max_steps = steps
            del loop.on_run_start
            loop.on_run_start(fetcher)

        loop.max_steps, loop.on_run_start = steps + 1, on_run_start  # type: ignore[method-assign, assignment]
        try:
            fit.run()
        finally:
            loop.max_steps = steps

    fit.run = run  # type: ignore[method-assign]


def finish_epoch(trainer: pl.Trainer) -> None:
    """The run has been saved at the end of an epoch: do what is left of it, the step of plateau schedulers."""
    loop, epoch = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    if loop._num_ready_batches_reached():
        epoch.completed -= 1  # the epoch counts
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epoch.completed += 1


def restore_metrics(trainer: pl.Trainer, metrics: dict[str, Tensor]) -> None:
    """Put what was logged before into ``trainer.callback_metrics``, which plateau schedulers and callbacks read."""
    trainer._logger_connector._callback_metrics.update(metrics)


def epoch_sums(trainer: pl.Trainer) -> dict[str, dict[str, Any]]:
    """What ``self.log(..., on_epoch=True)`` has accumulated in this epoch of training, and how it was called, by a key
    of Lightning's. Of a metric object the tensors of its state."""
    sums = {}
    for key, entry in trainer.fit_loop.epoch_loop._results.items():
        meta, sync = entry.meta, entry.meta.sync
        if entry.has_reset or not meta.on_epoch or sync.group is not None:  # a process group can't be saved
            continue
        how = {
            "fx": meta.fx, "name": meta.name, "prog_bar": meta.prog_bar, "logger": meta.logger,
            "on_step": meta.on_step, "on_epoch": True, "reduce_fx": meta.reduce_fx.__name__,
            "add_dataloader_idx": meta.add_dataloader_idx, "metric_attribute": meta.metric_attribute,
            "sync_dist": sync.should, "rank_zero_only": sync.rank_zero_only,
        }  # fmt: skip
        metric = entry if entry.is_tensor else entry.value
        state = {name: move_data_to_device(value, torch.device("cpu")) for name, value in metric.metric_state.items()}
        sums[key] = {"how": how, "state": state, "is_tensor": entry.is_tensor}
    return sums


class ContinuedSums:
    """What an earlier run had accumulated of an epoch's metrics goes into the rest of the epoch.

    Args:
        trainer: that goes on in the epoch. Metric objects of its module get their state at once.
        sums: of the earlier run.
    """

    def __init__(self, trainer: pl.Trainer, sums: Mapping[str, Mapping[str, Any]]) -> None:
        self._trainer = trainer
        self._results = trainer.fit_loop.epoch_loop._results
        self._tensors: dict[str, Mapping[str, Any]] = {}
        self._objects: dict[str, Mapping[str, Any]] = {}
        for key, saved in sums.items():
            if saved["is_tensor"]:
                self._tensors[key] = saved
            elif isinstance(self._object(saved), Metric):
                self._objects[key] = saved
                self._fill(self._object(saved), saved["state"])
        self._results.log = self._log  # type: ignore[method-assign]

    def _object(self, saved: Mapping[str, Any]) -> Any:
        try:
            return self._trainer.lightning_module.get_submodule(saved["how"]["metric_attribute"] or "")
        except AttributeError:
            return None

    def _fill(self, metric: Metric, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(metric, name, move_data_to_device(value, metric.device))

    def _log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        type(self._results).log(self._results, fx, name, value, *args, **kwargs)
        key = f"{fx}.{name}"
        self._objects.pop(key, None)
        if key in self._tensors:
            self._add(self._results[key], self._tensors.pop(key))

    def _add(self, entry: Any, saved: Mapping[str, Any]) -> None:
        """To what the first batch has logged; left alone if that is of another kind."""
        if entry.is_tensor and entry.meta.reduce_fx.__name__ == saved["how"]["reduce_fx"]:
            is_sum = entry.meta.is_mean_reduction or entry.meta.is_sum_reduction
            both = torch.add if is_sum else entry.meta.reduce_fx
            for part, before in saved["state"].items():
                now = getattr(entry, part)
                setattr(entry, part, both(before.to(now.device), now))

    def end(self, *, logs: bool) -> None:
        """The epoch ends, for which the run may have had no batch left.

        Args:
            logs: this rank logs what is left.
        """
        del self._results.log
        for key, saved in [*self._tensors.items(), *self._objects.items()] if logs else []:
            how = {**saved["how"], "sync_dist_fn": self._trainer.strategy.reduce}
            value = torch.zeros(()) if saved["is_tensor"] else self._object(saved)
            self._results.log(value=value, batch_size=0, **how)
            if saved["is_tensor"]:
                for part, before in saved["state"].items():
                    setattr(self._results[key], part, before.to(self._trainer.strategy.root_device))


def in_mid_epoch(trainer: pl.Trainer) -> bool:
    """At the start of training: does it go on in an epoch that an earlier run has begun?"""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return epochs.processed < epochs.ready


def ends_update(trainer: pl.Trainer) -> bool:
    """Was the last batch the last one of its update, if several are accumulated?"""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def save_last(checkpoint: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Save what ModelCheckpoint calls the last checkpoint, whatever its triggers and ``save_last`` say. All ranks call
    it.

    Returns:
        The path.
    """
    wanted, checkpoint.save_last = checkpoint.save_last, True
    try:
        checkpoint._save_last_checkpoint(trainer, checkpoint._monitor_candidates(trainer))
    finally:
        checkpoint.save_last = wanted
    return checkpoint.last_model_path


# -- checkpoints -------------------------------------------------------------------------------------------------


def open_directories(
    is_directory: Callable[[str | Path], bool],
    read: Callable[[str | Path, bool], Any],
    replacing: Callable[[Path], AbstractContextManager[Path]],
) -> None:
    """Let Lightning's own strategies and ``load_from_checkpoint`` open checkpoints that are directories, and let files
    replace them. Where there is no such directory nothing changes.

    All end in private functions, which expect a file; one that is written where a directory is lands inside it. The
    public way is a ``CheckpointIO``: every Trainer would have to be given one, and ``load_from_checkpoint`` takes none.

    Args:
        is_directory: is a path such a checkpoint?
        read: what is in it, from its path and ``weights_only``.
        replacing: where to write a file that is to replace a directory.
    """

    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not isinstance(path, str | Path) or not (Path(path).is_dir() or is_directory(path)):
            return _load(path, map_location, weights_only)
        content = read(path, weights_only is not False)
        if isinstance(map_location, str | torch.device):  # functions and dictionaries are about the files' storages
            content["state_dict"] = {name: tensor.to(map_location) for name, tensor in content["state_dict"].items()}
        return content

    def save(checkpoint: dict[str, Any], path: str | Path) -> None:
        if not is_directory(path):
            _atomic_save(checkpoint, path)
            return
        with replacing(Path(path)) as new:
            _atomic_save(checkpoint, new)

    saving.pl_load = torch_io.pl_load = load  # type: ignore[attr-defined,assignment]
    torch_io._atomic_save = save  # type: ignore[attr-defined,assignment]


# -- data --------------------------------------------------------------------------------------------------------


class LoaderSource:
    """Where the loop that a Trainer is about to run gets its loaders from.

    Args:
        source: the loop's private attribute ``_data_source``.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def get(self) -> Any:
        """The loaders, as the user returns or passes them, noting how they were made: Lightning makes them anew with
        another sampler, for which it needs that."""
        return _request_dataloader(self._source)

    def hand_over(self, loaders: Any) -> None:
        """Let Lightning get these the next time that it asks, if the user hasn't passed others by then."""
        instance = self._source.instance

        def dataloader() -> Any:
            del self._source.dataloader
            return loaders if self._source.instance is instance else self._source.dataloader()

        self._source.dataloader = dataloader


def loader_source(trainer: pl.Trainer) -> LoaderSource:
    """Of the loop that the Trainer is about to run."""
    return LoaderSource(trainer._active_loop._data_source)  # type: ignore[union-attr]


def mode_of(loader: CombinedLoader) -> Any:
    """How a combined loader combines."""
    return loader._mode


def samples_predicted(trainer: pl.Trainer) -> list[tuple[list[int], int | None]]:
    """For each loader of ``trainer.predict`` the number of samples in each batch that it gave, and its batch size; the
    size is None if Lightning hasn't divided the samples over the replicas. Its batch sampler notes them."""
    combined = trainer.predict_loop._combined_loader
    assert combined is not None
    found: list[tuple[list[int], int | None]] = []
    for loader, predictions in zip(combined.flattened, trainer.predict_loop._predictions, strict=True):
        batches = getattr(loader, "batch_sampler", None)
        seen = getattr(batches, "seen_batch_indices", [])[: len(predictions)]
        is_divided = isinstance(getattr(batches, "sampler", None), UnrepeatedDistributedSampler)
        size = getattr(batches, "batch_size", None) if is_divided and len(seen) == len(predictions) else None
        found.append(([len(indices) for indices in seen], size))
    return found


def before_batch_transfer(module: pl.LightningModule, batch: Any) -> Any:
    """The user's hook ``on_before_batch_transfer``, of the module or of its data module."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


# -- metrics and loops -------------------------------------------------------------------------------------------


def reads_training_metric(callback: Callback, global_step: int) -> bool:
    """Does a checkpoint callback read a training metric after this step? Its triggers are kept privately."""
    if not isinstance(callback, ModelCheckpoint) or callback.monitor is None:
        return False
    every = callback._every_n_train_steps
    return (every >= 1 and global_step % every == 0) or callback._train_time_interval is not None


def evaluation_outputs(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """What ``trainer.validate()`` is going to return, a dictionary for each data loader: at the end of an epoch it is
    in the loop that runs."""
    outputs: list[dict[str, Any]] = trainer._active_loop._logged_outputs  # type: ignore[union-attr]
    return outputs


def metrics_of_no_loader(trainer: pl.Trainer) -> dict[str, Any]:
    """What was logged at the end of an evaluation for no data loader in particular. Lightning adds it to the outputs
    only after the hooks that read them here."""
    if trainer._results is None or trainer.sanity_checking:
        return {}
    found: dict[str, Any] = trainer._logger_connector.metrics["log"]
    return found


def step_value(metric: Any) -> Any:
    """What the last forward of one of torchmetrics' objects returned, which Lightning logs as its value of the step."""
    return getattr(metric, "_forward_cache", None)


def set_step_value(metric: Any, value: Tensor) -> None:
    """Replace :func:`step_value`."""
    metric._forward_cache = value


def tell_device(module: Any, tell: Callable[[str, torch.device], None], device: torch.device) -> None:
    """If a module stores the device that ``module.device`` returns, call ``tell(attribute, device)`` to change it. A
    copy of the module on another device needs this."""
    if "_device" in vars(module):
        tell("_device", device)
