"""What every multi-process strategy of the package shares: launch, ranks, groups, collectives, samplers, seeds.

A subclass says how large its axes are (:meth:`LayoutStrategy.axes`) and what becomes of the model. Collectives that
Lightning and the user's code reach through the strategy (``self.all_gather``, ``sync_dist=True``) run over the data
axis, whose ranks see different batches; decisions and barriers are world-wide.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import random
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_parallel.layout import Groups, Layout, Size, make_groups
from lightning_parallel.strategies.loaders import warn_of_equal_shares

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=30)


class LayoutStrategy(ParallelStrategy):
    """Base of the strategies that run a process a device.

    Args:
        timeout: how long a rank waits for another before it gives up.
        process_group_backend: ``"gloo"`` or ``"nccl"``; by default NCCL where every rank has a GPU of its own, gloo
            elsewhere.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in Lightning's
            strategies; the Trainer fills them in. ``parallel_devices`` may name one GPU several times, for ranks that
            share it.
    """

    def __init__(
        self,
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
        process_group_backend: str | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._timeout = timeout
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._layout: Layout | None = None
        self._groups: Groups | None = None

    # -- layout --------------------------------------------------------------------------------------------------

    def axes(self) -> Mapping[str, Size]:
        """The sizes that the user gave to the axes, by name of the axis."""
        raise TypeError(f"{type(self).__name__} is abstract: it has no axes")

    @property
    def layout(self) -> Layout:
        """Who this rank is. Known from the moment the Trainer is made."""
        if self._layout is None or self._layout.rank != self.global_rank:
            self._layout = Layout.resolve(self.num_processes * self.num_nodes, self.global_rank, **self.axes())
        return self._layout

    @property
    def groups(self) -> Groups:
        assert self._groups is not None, "the process groups are made in setup_environment"
        return self._groups

    @property
    def is_distributed(self) -> bool:
        """Lightning asks for this name to decide on injecting samplers. With one replica there is nothing to divide:
        every rank iterates the user's own loader, as a single process does."""
        return self.layout.data > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Ranks of one replica see the same samples in the same order.
        return {"num_replicas": self.layout.data, "rank": self.layout.data_rank}

    # -- launch --------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        Layout.resolve(self.num_processes * self.num_nodes, 0, **self.axes())  # refused before any process starts
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # how Lightning tells its helpers

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if not _distributed_is_initialized():
            device: dict[str, Any] = {"device_id": self.root_device} if self._backend() == "nccl" else {}
            _init_dist_connection(self.cluster_environment, self._backend(), timeout=self._timeout, **device)
            atexit.unregister(leave_the_group)
            atexit.register(leave_the_group)
            self._groups = None
        if dist.get_world_size() != self.layout.world_size:
            raise RuntimeError(
                f"A process group of {dist.get_world_size()} processes exists already, but this Trainer asks for "
                f"{self.layout.world_size} (devices x num_nodes). End it first with "
                f"torch.distributed.destroy_process_group(), or start this run in a fresh process."
            )
        if self._groups is None:
            self._groups = make_groups(self.layout, self._timeout, self.root_device)
        self._agree_on_seed()

    def _backend(self) -> str:
        if self._process_group_backend is not None:
            return self._process_group_backend
        devices = self.parallel_devices or []
        if len(set(devices)) < len(devices):
            return "gloo"  # NCCL can't join two ranks on one GPU
        return _get_default_process_group_backend_for_device(self.root_device)

    def _agree_on_seed(self) -> None:
        """Ranks of one replica must draw the same samples and augmentations.

        Where the user's script has left the same random state on all ranks, as ``seed_everything`` does, it stays as
        it is, and the data come in the order of a single process. Elsewhere rank 0 chooses a seed for all.
        """
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))
        states = (torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), random.getstate())  # type: ignore[index,union-attr]
        mine = (seed, hashlib.sha256(repr(states).encode()).hexdigest())
        gathered: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(gathered, mine)
        self._seed = gathered[0][0]
        if any(other != gathered[0] for other in gathered) or self.layout.data > 1:
            seed = self._seed + self.layout.data_rank
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)

    @property
    def seed(self) -> int:
        """The run's seed: the same on every rank."""
        return self._seed

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        if self.layout.data == 1:
            # Right for several replicas; with one, what is logged is already the whole.
            warnings.filterwarnings("ignore", message=r".*self\.log\(.*sync_dist=True")
        self.accelerator.setup(trainer)
        self._synchronise_metrics_over_replicas()
        self.model = self.precision_plugin.convert_module(self._module())
        self.distribute_model(trainer)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _synchronise_metrics_over_replicas(self) -> None:
        """torchmetrics' objects reduce over the world by default, where tensor ranks would count each sample again, and
        stages but the last have counted none."""
        for child in self._module().modules():
            if hasattr(child, "process_group") and hasattr(child, "sync_on_compute") and child.process_group is None:
                child.process_group = self.groups.data

    def distribute_model(self, trainer: pl.Trainer) -> None:
        """Give this rank its part of the model: before the move to the device, and before the optimizers are made."""

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.layout.data > 1 and isinstance(dataloader, torch.utils.data.DataLoader):
            warn_of_equal_shares(dataloader, self.layout.data)
        # Lightning seeds workers by global rank, which would give the stages of one replica different augmentations.
        seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
        if isinstance(dataloader, torch.utils.data.DataLoader) and seeded and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.layout.data_rank)
        return dataloader

    # -- collectives ---------------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data axis (or ``group``): what differs between ranks because their batches do."""
        group = self._data_group(group)
        if not isinstance(tensor, Tensor) or group is None:
            return tensor
        return _sync_ddp(tensor, group, reduce_op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the data axis (or ``group``). One replica: the tensor as it is, as with a single process."""
        group = self._data_group(group)
        return tensor if group is None else super().all_gather(tensor, group, sync_grads)

    def _data_group(self, group: Any | None) -> Any | None:
        """``group``; for none, and for the world, which ``LightningModule.all_gather`` says when the user gives none,
        that of the data axis. None: this rank alone."""
        if group is not None and group is not dist.group.WORLD:
            return group
        return self.groups.data if self.layout.data > 1 else None

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.layout.world_size) if all else bool(votes)

    @override
    def barrier(self, name: str | None = None) -> None:
        if _distributed_is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not _distributed_is_initialized():
            return obj
        boxed = [obj]
        dist.broadcast_object_list(boxed, src)
        return boxed[0]

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Close this rank's connections, so that the others, wherever they wait, end within seconds."""
        if _distributed_is_initialized():
            dist.destroy_process_group()
        self._groups = None


def leave_the_group() -> None:
    """Destroys the process group before the interpreter is finalized.

    A thread of gloo's needs Python's lock to release a collective's tensors. If it gets that only while the interpreter
    is being finalized, the process ends with SIGABRT, "terminate called without an active exception"
    (https://github.com/pytorch/pytorch/issues/190489). Destroying joins these threads, but for groups that something
    still refers to, as a script's Trainer does: theirs get the lock while this one sleeps.
    """
    if _distributed_is_initialized():
        gc.collect()  # a Trainer that is over is in cycles, and holds on to groups
        dist.destroy_process_group()
        time.sleep(0.01)
