"""Every private name of Lightning and torchmetrics that the package uses, with the reason why no public one does.

``tests/test_lightning_private.py`` pins each of them: when a new version of Lightning breaks one, a test there fails
and says what depends on it. Nothing else in the package imports or reads a private name of Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer

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


def without_sigterm_broadcast(trainer: pl.Trainer) -> Callable[[], None]:
    """Take the broadcast out that Lightning's training loop makes before every batch, to ask whether rank 0 received
    SIGTERM. Every rank waits for its answer, so no rank could start a batch before the last stage does.

    Returns:
        What puts it back.
    """
    loop = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def put_back() -> None:
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    return put_back


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
