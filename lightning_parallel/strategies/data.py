"""Data parallelism in one process, with a thread for each replica: what Lightning 1 called ``dp``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lightning_parallel.data.gather import gather
from lightning_parallel.data.metrics import in_turn, metric_itself
from lightning_parallel.data.parallel import DataParallel
from lightning_parallel.data.replicate import Replica
from lightning_parallel.data.scatter import Share
from lightning_parallel.pipeline.logs import LogRecorder

LossOn = Literal["replicas", "output_device"]


class DataParallelStrategy(SingleDeviceStrategy):
    """A replica of the model on each device, a share of every batch for each replica, all in this process.

    ``Trainer(devices=N)`` is N replicas; on the CPU, N threads. There is one model, on the first device, one optimizer
    and one Trainer: world size, checkpoints, samplers and callbacks are those of a single process, and the data
    loader's batch is what the replicas share.

    Every step copies the model to the replicas and its gradients back, and all threads want Python's interpreter lock:
    DDP, a process a device, is the faster of the two, often by far. What speaks for one process is simplicity: nothing
    to launch, notebooks, a debugger that sees all replicas.

    Args:
        loss_on: ``"replicas"`` runs the user's whole step on each replica's share, and takes the mean of the losses,
            weighted by samples: that of the whole batch, if the user's is a mean over samples. Each replica holds
            its outputs' memory. ``"output_device"`` runs the step once, on the first device; the calls of ``self(...)``
            in it are what the replicas share, and their outputs are gathered, as by torch.nn.DataParallel: so the
            loss may compare samples of the whole batch (contrastive losses), and the first device holds it all.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in Lightning's
            strategies; the Trainer fills them in. ``parallel_devices`` may name one GPU several times.

    BatchNorm's statistics are of a replica's share, and the running ones are replica 0's; so are attributes that a step
    sets. Metrics are updated in the order of the samples (``lightning_parallel/data/metrics.py``). Each replica's
    dropout has other numbers, in every run the same (``lightning_parallel/data/threads.py``).
    """

    strategy_name = "data_parallel"

    def __init__(
        self,
        *,
        loss_on: LossOn = "replicas",
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if loss_on not in get_args(LossOn):
            raise ValueError(f"loss_on={loss_on!r}: choose one of {', '.join(map(repr, get_args(LossOn)))}.")
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self._loss_on = loss_on
        self._layer_sync: LayerSync | None = None
        self._num_nodes = 1
        self._parallel: DataParallel | None = None
        self._forward_calls = 0  # in the step that runs: those that the replicas shared

    @property
    @override
    def root_device(self) -> torch.device:
        """The output device, which has the model."""
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(f"num_nodes={num_nodes}: {_ONE_PROCESS} Use num_nodes=1, or strategy='ddp'.")

    # -- set-up ------------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        # Nothing is launched. Here, the last call while the Trainer is made, all is known that can be refused.
        _check_devices(self.parallel_devices or [])
        if self.cluster_environment is not None and self.cluster_environment.world_size() > 1:
            size = self.cluster_environment.world_size()
            raise ValueError(f"{size} processes were launched: {_ONE_PROCESS} Launch one, or use strategy='ddp'.")
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True: replicas in threads normalise by the statistics of their share. Leave it out, or "
                "use strategy='ddp'."
            )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.parallel_devices
        _check_module(self._module(), self._loss_on, trainer.state.fn == TrainerFn.FITTING)
        super().setup(trainer)
        self._parallel = DataParallel(self.parallel_devices)

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- steps -------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._forward_calls = 0
        with self.precision_plugin.train_step_context():
            output = self._step("training_step", *args, *kwargs.values())
        if self._loss_on == "output_device" and not self._forward_calls:
            raise ValueError(
                "loss_on='output_device': training_step never called self(...), which is what the replicas share, so "
                "one device did all. Let training_step call self(...) with the inputs, or use loss_on='replicas'."
            )
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, *kwargs.values())

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, *kwargs.values())

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, *kwargs.values())

    def _step(self, name: str, batch: Any, *indices: int) -> Any:
        """The user's step ``name`` on the replicas, or on the output device with its forwards on the replicas."""
        if self._loss_on == "replicas":
            return self._on_replicas(name, lambda copy, part: getattr(copy, name)(part, *indices), batch)

        module = self._module()
        own = module.__dict__.get("forward")

        def shared_forward(*args: Any, **kwargs: Any) -> Any:
            self._forward_calls += 1
            with _forward_is(module, own):  # in the replicas, which are copied here
                call = (args, kwargs)
                return self._on_replicas(f"{name}.forward", lambda copy, part: copy.forward(*part[0], **part[1]), call)

        with _forward_is(module, shared_forward):
            return getattr(module, name)(batch, *indices)

    def _on_replicas(self, kind: str, call: Callable[[Any, Any], Any], batch: Any) -> Any:
        """``call(replica, share of the batch)``, gathered; what the replicas log is logged once."""
        assert self._parallel is not None
        recorders = [LogRecorder() for _ in self._parallel.devices]

        def run(replica: Replica, share: Share) -> Any:
            recorder = recorders[replica.number]
            recorder.weight = share.samples
            _settle(replica, recorder)
            return call(replica.module, share.batch)

        outputs, samples = self._parallel.apply(self._module(), run, batch, kind=kind, stand_in=in_turn)
        for recorder in recorders[1:]:
            recorders[0].extend(recorder)
        recorders[0].replay(self._module().log)
        return gather(outputs, samples, self.root_device)

    # -- the end -----------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._parallel is not None:
            self._parallel.close()
            self._parallel = None


_ONE_PROCESS = "DataParallelStrategy runs all replicas in one process, on one machine."


def _check_devices(devices: list[torch.device]) -> None:
    kinds = {device.type for device in devices}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        named = ", ".join(map(str, devices))
        raise ValueError(f"parallel_devices=[{named}]: replicas are all on the CPU, or all on GPUs. Name one kind.")
    count = torch.cuda.device_count() if "cuda" in kinds else 0
    for device in devices:
        if device.type == "cuda" and not (device.index is not None and device.index < count):
            present = ", ".join(f"cuda:{i}" for i in range(count)) or "none"
            raise ValueError(
                f"parallel_devices names {device}, and the GPUs that this machine has are: {present}. Name others; one "
                f"may be named several times."
            )


def _check_module(module: pl.LightningModule, loss_on: LossOn, training: bool) -> None:
    if training and loss_on == "replicas" and not module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False with loss_on='replicas': each replica's training_step would step the one "
            "model's optimizer with its share's gradients. Use loss_on='output_device', or automatic optimization."
        )
    if training and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError("training_step(dataloader_iter): replicas share batches, so it needs training_step(batch).")


def _settle(replica: Replica, recorder: LogRecorder) -> None:
    """What a copied LightningModule knows of itself: where it is, and where it logs."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        recorder.log(name, metric_itself(value), *args, **kwargs)

    replica.copied[0].set("log", log)
    for each in replica.copied:
        if "_device" in each.copy.__dict__:  # Lightning's cache of where a module is; its setter is .to()
            each.set("_device", replica.device)


@contextlib.contextmanager
def _forward_is(module: pl.LightningModule, forward: Callable[..., Any] | None) -> Iterator[None]:
    """``self(...)`` is ``forward`` inside; None: what the class defines. An instance attribute, as Lightning's own
    strategies set it."""
    before = module.__dict__.get("forward")
    _set_forward(module, forward)
    try:
        yield
    finally:
        _set_forward(module, before)


def _set_forward(module: pl.LightningModule, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
