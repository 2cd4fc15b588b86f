"""Data parallelism in one process: what Lightning 1 called ``dp``.

::

    Lightning            here
    training_step        batch -> shares -> the user's step on every replica, in turn -> outputs joined
    backward             through all replicas to the one model's weights
    clip, step           of the one model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parallel.callbacks.defaults import bring_along
from lightning_parallel.checks.other_lightning import warn_of_other_modules
from lightning_parallel.local_replicas import Share, on_replicas, set_apart
from lightning_parallel.private.lightning.launching import launched_by_make_launcher, layer_sync_of
from lightning_parallel.private.lightning.metrics import set_device
from lightning_parallel.ranks.writes import Writes
from lightning_parallel.results.log_joins import LogJoins
from lightning_parallel.results.logs import LogRecorder, logging_through
from lightning_parallel.settings import SET_BY_TRAINER, check, takes
from lightning_parallel.values import first_few


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """The settings of :class:`DataParallelStrategy`.

    Args:
        parallel_devices: filled in by the Trainer, as are those below; may name one GPU several times.
    """

    parallel_devices: list[torch.device] | None = field(default=None, metadata=SET_BY_TRAINER)
    accelerator: Accelerator | None = field(default=None, metadata=SET_BY_TRAINER)
    cluster_environment: ClusterEnvironment | None = field(default=None, metadata=SET_BY_TRAINER)
    checkpoint_io: CheckpointIO | None = field(default=None, metadata=SET_BY_TRAINER)
    precision_plugin: Precision | None = field(default=None, metadata=SET_BY_TRAINER)

    def __post_init__(self) -> None:
        check(self)


@launched_by_make_launcher
class DataParallelStrategy(SingleDeviceStrategy):
    """A replica of the model on each device, a share of every batch for each replica, all in one process.

    ::

        trainer = L.Trainer(devices=2, strategy=DataParallelStrategy())   # on the CPU: two replicas
        trainer.fit(AnyLightningModule(), datamodule)

    There is one model, on the first device, one optimizer and one Trainer. World size, checkpoints, samplers and
    callbacks are those of a single process, and the replicas share the batch of the data loader.

    A replica runs the user's whole step on its share, and the batch's loss is the mean of theirs, weighted by samples.
    This is the loss of the whole batch, if the user's is a mean over samples. With one device a step runs as it stands,
    so it takes any batch and returns anything.

    The replicas run one after the other. GPUs compute at the same time all the same, unless a step waits for them
    (``.item()``, metrics that check their arguments). On a CPU replicas gain nothing: they show what would happen on
    GPUs. Every step copies the model to the other GPUs and their gradients back. DDP, with a process for each device,
    is faster, often by far. One process is simpler: nothing to launch, and a notebook or a debugger sees all replicas.

    BatchNorm normalises over a replica's share, and its running statistics are those of replica 0. So are attributes
    that a step sets. Where the replicas' values differ, a warning names them. Metrics are updated in the order of the
    samples. Each replica draws its own dropout masks, which are the same in every run.
    """

    strategy_name = "data_parallel"

    @takes(DataParallelOptions)
    def __init__(self, options: DataParallelOptions) -> None:
        warn_of_other_modules()
        super().__init__(
            accelerator=options.accelerator,
            checkpoint_io=options.checkpoint_io,
            precision_plugin=options.precision_plugin,
        )
        self.parallel_devices = options.parallel_devices
        self.cluster_environment = options.cluster_environment
        self.num_nodes = 1  # the Trainer sets its own
        self._joins = LogJoins()
        self._writes: dict[Any, Writes] = {}  # by the module's id and the Trainer's stage

    @property
    @override
    def root_device(self) -> torch.device:
        """The output device, which has the model."""
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    # -- set-up --------------------------------------------------------------------------------------------------

    def make_launcher(self) -> None:
        """Launches nothing. As Lightning's last call while it makes the Trainer, it can refuse wrong settings."""
        if self.num_nodes != 1:
            raise ValueError(f"num_nodes={self.num_nodes}: {_ONE_PROCESS} Use num_nodes=1, or strategy='ddp'.")
        if self.cluster_environment is not None and self.cluster_environment.world_size() > 1:
            size = self.cluster_environment.world_size()
            raise ValueError(f"{size} processes were launched: {_ONE_PROCESS} Launch one, or use strategy='ddp'.")
        if layer_sync_of(self) is not None:
            raise ValueError(
                "sync_batchnorm=True: the replicas normalise by the statistics of their share. Leave it out, or use "
                "strategy='ddp'."
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        bring_along(self._module().trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not self._module().automatic_optimization:
            raise ValueError(
                "automatic_optimization=False: each replica's training_step would step the optimizer with its share's "
                "gradients. Use automatic optimization, or strategy='ddp'."
            )
        super().setup(trainer)

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- a batch -------------------------------------------------------------------------------------------------

    def _step(self, name: str, batch: Any, *indices: int) -> Any:
        """Run the user's step ``name`` on the replicas. With one device it runs as it stands."""
        module = self._module()
        with self.precision_plugin.forward_context():
            if self.parallel_devices is None or len(self.parallel_devices) == 1:  # there is nothing to split or to join
                return getattr(module, name)(batch, *indices)
            return self._on_replicas(module, name, batch, indices)

    # Lightning's four steps.
    training_step = partialmethod(_step, "training_step")  # type: ignore[assignment]
    validation_step = partialmethod(_step, "validation_step")  # type: ignore[assignment]
    test_step = partialmethod(_step, "test_step")  # type: ignore[assignment]
    predict_step = partialmethod(_step, "predict_step")  # type: ignore[assignment]

    def _on_replicas(self, module: pl.LightningModule, name: str, batch: Any, indices: Sequence[int]) -> Any:
        """The joined results of the replicas' steps. What the replicas log is logged once."""
        assert self.parallel_devices
        recorder = LogRecorder(self._joins)
        apart: dict[str, None] = {}
        occasion = (id(module), module.trainer.state.stage)
        is_first = occasion not in self._writes
        writes = self._writes.setdefault(occasion, Writes(_WRITES, None))

        def run(replica: Any, share: Share) -> Any:
            for copy in {*replica.modules()} - {*module.modules()}:
                set_device(copy, share.device)
            recorder.begin(share.samples)
            if replica is not module:  # the first one may write, and the others may write the same again
                writes.begin(dict(replica.named_parameters()))
            with logging_through(replica, recorder.log):
                output = getattr(replica, name)(share.batch, *indices)
            writes.end(replica.named_parameters())
            if is_first:
                apart.update(dict.fromkeys(set_apart(module, replica)))
            return output

        joined = on_replicas(run, module, batch, self.parallel_devices)
        writes.check()
        if apart:
            rank_zero_warn(
                f"Replicas come to different values of {first_few([repr(name) for name in apart])}. Those of the first "
                f"replica are kept, which sees its share of each batch. Use an object of torchmetrics, or "
                f"strategy='ddp'."
            )
        recorder.replay(module.log)
        return joined


_ONE_PROCESS = "DataParallelStrategy runs all replicas in one process, on one machine."
_WRITES = (
    "The step changes the parameter '{}' in place: each replica does so again. Do it in on_train_batch_end, or use "
    "strategy='ddp'."
)
