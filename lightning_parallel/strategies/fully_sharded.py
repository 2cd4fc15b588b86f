"""Fully sharded data parallelism: a share of every batch, and a share of the model, on each rank.

The sharding is torch's own (``torch.distributed.fsdp.fully_shard``), for Lightning modules as they are. The blocks of
the model are its units (:mod:`lightning_parallel.data.units`). What lies around them belongs to the root::

    _Root                      fully_shard: gathered for the whole step
      LightningModule          the user's class, untouched; its steps run as the root's forward
        embedding, head, ...
        block 0, 1, ...        fully_shard each: gathered while it runs, forward and backward

Lightning's steps are no ``forward``, by whose hooks ``fully_shard`` works; so they are called through the root's, as
Lightning does with DDP's wrapper. A parameter without dimensions can't be sharded: every rank keeps it whole, and the
gradients are averaged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.data.averaging import GradientAverager
from lightning_parallel.data.copies import make_equal
from lightning_parallel.data.units import check_dtypes, find_units, materialize
from lightning_parallel.layout import Size
from lightning_parallel.pipeline.weights import add_gradients, swap_gradients
from lightning_parallel.strategies.checkpointed import CheckpointedStrategy, Held
from lightning_parallel.strategies.clipping import clip_by_norm, install


class _Root(nn.Module):
    """Holds the parameters that lie in no unit, and runs the user's steps as its forward."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class FullyShardedStrategy(CheckpointedStrategy):
    """Data parallelism with parameters, gradients and optimizer state in shards (ZeRO-3, Rajbhandari et al. 2020).

    ::

        trainer = L.Trainer(devices=2, strategy=FullyShardedStrategy())
        trainer.fit(AnyLightningModule(), datamodule)

    In the user's hooks parameters and their gradients are shards (DTensors); inside ``training_step`` and the other
    steps, and there only, they are whole. All ranks have to use the same parameters in a step. Where the module has a
    ``configure_model()``, what that builds takes no memory until it is sharded, unit by unit, and gets its values from
    each module's ``reset_parameters()``.

    Mixed precision is autocast's, as under DDP, whose numbers it has: parameters are gathered, and gradients reduced,
    in the parameters' own dtype; a loss scaler finds the overflow of any shard. Gradients are reduced after each batch,
    when several are accumulated too: a rank never holds more than its shard of them.

    Args:
        data_parallel: ranks that share the model; ``"auto"``: all of them.
        reshard_after_forward: free a unit's parameters after its forward, and gather them again for its backward.
            Without, less is sent, and the whole model is in memory between the two.
        cpu_offload: keep shards and optimizer state in the memory of the CPU, where the optimizer then runs.
        units: names of the modules that are gathered at a time, ``*`` standing for one part, as in
            ``["net.blocks.*"]``. They have to run through their ``forward``. By default the layers that a pipeline
            would be cut between: the children of the largest ``nn.Sequential`` or ``nn.ModuleList``.
        **kwargs: of :class:`~lightning_parallel.strategies.base.LayoutStrategy`.
    """

    def __init__(
        self,
        *,
        data_parallel: Size = "auto",
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        units: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._data_parallel = data_parallel
        self._reshard_after_forward = reshard_after_forward
        self._cpu_offload = cpu_offload
        self._units = units
        self._sharded: pl.LightningModule | None = None
        self._root: FSDPModule | None = None
        self._whole: dict[str, nn.Parameter] = {}  # parameters that can't be sharded
        self._held: Held | None = None

    @override
    def axes(self) -> Mapping[str, Size]:
        return {"data": self._data_parallel}

    @override
    def held(self) -> Held:
        assert self._held is not None, "the model is sharded in Trainer.fit, validate, test and predict"
        return self._held

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model()``."""
        with torch.device("meta"):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        # Gathered parameters live on from evaluation to training, where tensors made in inference mode are of no use.
        epochs = trainer.fit_loop.epoch_loop
        for loop in (epochs.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        super().setup(trainer)

    @override
    def distribute_model(self, trainer: pl.Trainer) -> None:
        module = self._module()
        if self._sharded is not module:
            self._shard(module)
            self._sharded, self._held = module, Held.of(module)
            self.share_buffers()
        assert isinstance(self._root, nn.Module)
        self.model = self._root

    def _shard(self, module: pl.LightningModule) -> None:
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(
                "The module's parameters are shards already, of another Trainer or of your own. Build the module anew "
                "for this Trainer, and load its weights from a checkpoint."
            )
        units = find_units(module, self._units)
        offload = self._cpu_offload and self.root_device.type != "cpu"
        options: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(self.groups.data, self.root_device.type, mesh_dim_names=("data",)),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        whole: set[nn.Parameter] = set()
        root = _Root(module)
        for name, part in (*units.items(), ("", root)):  # the root last: it takes what the others have left
            materialize(name, part if name else module, self.root_device)
            parameters = [p for p in part.parameters() if not isinstance(p, DTensor) and p not in whole]
            for parameter in parameters:
                parameter.data = parameter.data.to(self.root_device).contiguous()
            # User's scripts need not seed their weights.
            make_equal(parameters, self.layout.rank_of(data=0), self.groups.data)
            whole.update(parameter for parameter in parameters if parameter.dim() == 0)
            check_dtypes(name, [parameter for parameter in parameters if parameter.dim() > 0])
            # None: the root's parameters stay, since its backward begins as soon as its forward has ended.
            reshard = self._reshard_after_forward if part is not root else None
            fully_shard(part, reshard_after_forward=reshard, ignored_params=whole, **options)
        assert isinstance(root, FSDPModule)
        self._root = root
        self._whole = {name: parameter for name, parameter in module.named_parameters() if parameter in whole}

    @override
    def model_to_device(self) -> None:
        # fully_shard has moved, or left on the CPU, all parameters and buffers. Metrics hold other tensors.
        for module in self._module().modules():
            if next(module.parameters(), None) is None:
                module.to(self.root_device)
        # What `module.device` says. Lightning offers no other way than to move the module.
        _update_properties(self._module(), device=self.root_device)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # The plugin's own see shards and whole gradients in one list, which torch refuses.
        install(self.precision_plugin, self.clip_gradients_by_norm)

    # -- training ------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with _explained():
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As Lightning's, with the gradients of what is whole averaged before any hook sees them."""
        module = self._module()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        accumulated = swap_gradients(self._whole, {})  # of earlier batches: averages already
        with _explained():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self._whole:
            fresh = GradientAverager(self._whole, self.groups.data).finish(swap_gradients(self._whole, accumulated))
            add_gradients(self._whole, fresh)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def clip_gradients_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """What ``gradient_clip_val`` with the algorithm "norm" does: shards make up one norm."""
        clip_by_norm(
            list(self.precision_plugin.main_params(optimizer)),
            clip_val,
            counts=lambda _: True,
            replicas=self.groups.data,
            parts=None,
            device=self.root_device,
        )

    # -- evaluation ----------------------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _explained():
            output = step(*args, **kwargs)
        assert self._root is not None
        self._root.reshard()  # after training steps the backward does
        return output

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        # Lightning's, but for the move of the module to the CPU: from there fully_shard would not bring it back.
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            "A parameter was used while it was in shards: its unit's `forward` was not running. A unit's weights can't "
            "be used from outside of it, nor by its other methods: name other modules in `units`, or leave this one "
            "out."
        ) from error
