"""Fully sharded data parallelism: a share of every batch, and a part of every parameter, on each rank.

The sharding is torch's own (``torch.distributed.fsdp.fully_shard``), for LightningModules as they are. The blocks of
the model are its units (:mod:`lightning_parallel.fully_sharded.units`). What lies around them belongs to the root::

    _Root                      fully_shard: gathered for the whole step
      LightningModule          the user's class, untouched; its steps run as the root's forward
        embedding, head, ...
        block 0, 1, ...        fully_shard each: gathered while it runs, forward and backward

``fully_shard`` hooks into ``forward``, but Lightning calls ``training_step``. So the steps are called through the
forward of the root, as Lightning does with DDP's wrapper. A parameter without dimensions can't be divided: every rank
keeps it whole, and its gradient is averaged here.

A step with manual optimization updates parameters while it runs, so nothing may stay gathered for all of it. There is
no root then: each network that the module holds (a GAN's generator and discriminator) is a unit, and parameters outside
of all networks are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.callbacks.start_table import Holding
from lightning_parallel.checks.manual import BackwardGuard, networks
from lightning_parallel.cuts.layers import Layers, named_layers
from lightning_parallel.fully_sharded.units import check_dtypes, materialize, refuse_second_derivatives, untied
from lightning_parallel.fully_sharded.uses import Uses
from lightning_parallel.gradients.swapping import add_gradients, swap_gradients
from lightning_parallel.private.lightning.launching import callbacks_of
from lightning_parallel.ranks.collectives import broadcast_tensors
from lightning_parallel.ranks.local_model import LocalModel
from lightning_parallel.ranks.writes import Writes
from lightning_parallel.set_up.options import ProcessOptions
from lightning_parallel.set_up.part_of_model import attributes_kept, configure_part, move_others, refuse_calls
from lightning_parallel.settings import Auto, Count, takes
from lightning_parallel.strategies.base import LayoutStrategy


@dataclass(frozen=True, kw_only=True)
class FullyShardedOptions(ProcessOptions):
    """The settings of :class:`FullyShardedStrategy`.

    Args:
        data_parallel: the number of ranks that share the model; ``"auto"``: all of them.
        reshard_after_forward: free a unit's parameters after its forward, and gather them again for its backward.
            False: less is sent, but the whole model stays in memory between the two.
        cpu_offload: keep this rank's part of the parameters and of the optimizer state in CPU memory, and run the
            optimizer there.
        units: the names of the modules that are gathered at a time; ``*`` stands for one part, as in
            ``["net.blocks.*"]``. They have to run through their ``forward``. By default the children of the lists
            (``nn.Sequential``, ``nn.ModuleList``) that the model is made of. With manual optimization also the module's
            children, which the step has to call.
    """

    data_parallel: Count | Auto = "auto"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    units: Sequence[str] | None = None


class _Root(nn.Module):
    """Holds the parameters that lie in no unit, and runs the user's steps as its forward."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class FullyShardedStrategy(LayoutStrategy):
    """Data parallelism with parameters, gradients and optimizer state fully sharded (ZeRO-3, Rajbhandari et al. 2020).

    ::

        trainer = L.Trainer(devices=2, strategy=FullyShardedStrategy())
        trainer.fit(AnyLightningModule(), datamodule)

    In hooks, parameters and their gradients are DTensors, of which each rank has a part. Only inside ``training_step``
    and the other steps they are whole. All ranks have to use the same parameters in a step.

    Mixed precision is autocast's, as under DDP, with the same numbers: parameters are gathered, and gradients reduced,
    in the parameters' own dtype, and a loss scaler finds the overflow of any rank. Gradients are reduced after each
    batch, also when several are accumulated: a rank never holds more than its part of them.

    On one rank nothing is divided, unless ``cpu_offload`` asks for it: Lightning runs the module as in one process.
    """

    options: FullyShardedOptions
    calls_configure_part = True
    _uses: Uses  # from set-up on

    @takes(FullyShardedOptions)
    def __init__(self, options: FullyShardedOptions) -> None:
        super().__init__(options, data=options.data_parallel)
        self._fully_sharded: pl.LightningModule | None = None
        self._root: _Root | None = None  # with automatic optimization
        self._units: list[FSDPModule] = []  # all of them, the root too
        self._outside: set[nn.Module] = set()  # whose divided parameters only the root gathers, and the module
        self._writes: dict[bool, Writes] = {}  # in training, and in evaluation
        self._guard = BackwardGuard()
        self._example_back = ExitStack()  # gives the module its example_input_array

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        # Parameters that evaluation gathered are used again in training, where tensors made in inference mode fail.
        epochs = trainer.fit_loop.epoch_loop
        for loop in (epochs.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        run = self.prepare(trainer)
        module = run.module
        if self.holds_all:
            configure_part(module)
            self.hold(LocalModel.of(module))
            return self.begin_averages()
        if self._fully_sharded is not module:
            with attributes_kept(module):
                self._fully_shard(module)
        if self._root is not None:
            self.model = self._root
        local = LocalModel.of(module)
        self.hold(local)
        if run.trains:
            self.replicas.begin(watch=False)
            if self._root is not None:
                self._take_example(trainer)
                self._at_end.callback(self._example_back.close)
            self._guard.begin([] if module.automatic_optimization else local.replicated.values())
            self._at_end.callback(self._guard.end)
        self.begin_averages()

    def _fully_shard(self, module: pl.LightningModule) -> None:
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(
                "The module's parameters are fully sharded already, by another Trainer, before an error, or by you. "
                "Build a new module for this Trainer, and load its weights from a checkpoint."
            )
        manual = not module.automatic_optimization
        units = find_units(module, self.options.units, manual=manual)
        offload = self.options.cpu_offload and self.root_device.type != "cpu"
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        replicas = self.groups.along("data")
        mesh = DeviceMesh.from_group(replicas, self.root_device.type, mesh_dim_names=("data",))
        scalars: set[nn.Parameter] = set()
        root = None if manual else _Root(module)
        self._units = []
        for name, part in (*units.items(), ("", root or module)):  # the rest last: what the others have left
            materialize(name, part if name else module, self.root_device)
            parameters = [p for p in part.parameters() if not isinstance(p, DTensor) and p not in scalars]
            for parameter in parameters:
                parameter.data = parameter.data.to(self.root_device).contiguous()
            # A user's script need not seed its weights.
            broadcast_tensors(parameters, self.layout.rank_at(data=0), replicas)
            if part is module:
                break  # there is no root
            scalars.update(parameter for parameter in parameters if parameter.dim() == 0)
            # None: the root's parameters stay, since its backward begins as soon as its forward has ended.
            reshard = self.options.reshard_after_forward if part is not root else None
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy, ignored_params=scalars)
            assert isinstance(part, FSDPModule)
            self._units.append(part)
            part.register_forward_pre_hook(partial(self._gathered, module))
            part.register_forward_hook(partial(self._about_to_free, module), prepend=True)  # before torch's own
            if name:
                refuse_second_derivatives(name, part)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.root_device)
        configure_part(module)
        checked = set(scalars)
        for name, part in (*units.items(), *([("", root)] if root else ())):
            own = [parameter for parameter in part.parameters() if parameter not in checked]
            check_dtypes(name, own)
            checked.update(own)
        self._root, self._fully_sharded = root, module
        divided = {
            name: part
            for name, part in module.named_modules()
            if any(isinstance(parameter, DTensor) for parameter in part.parameters(recurse=False))
        }
        host_group = self.groups.on_host(self.layout.peers("data"))
        self._uses = Uses(units, divided, host_group)
        self._outside = {module, *divided.values()} - {part for unit in units.values() for part in unit.modules()}
        self._writes = {training: Writes(_LOST, host_group) for training in (True, False)}

    @property
    @override
    def holds_all(self) -> bool:
        """Is there one rank, which has no reason to keep its parameters elsewhere?"""
        return self.layout.world_size == 1 and not self.options.cpu_offload

    @override
    def holding(self) -> Holding:
        return Holding("all" if self.holds_all else "all, fully sharded")

    @override
    def model_to_device(self) -> None:
        if self.holds_all:
            return super().model_to_device()
        move_others(self.run.module, self.root_device)  # fully_shard has moved the others, or left them on the CPU

    def _take_example(self, trainer: pl.Trainer) -> None:
        """Lightning's summary would call the module outside of a step. Without an example it has no sizes."""
        module = self.run.module
        example = module.example_input_array
        if example is None or not any(isinstance(each, ModelSummary) for each in callbacks_of(trainer)):
            return
        try:
            module.example_input_array = None
        except AttributeError:
            raise ValueError(
                f"{type(module).__name__}.example_input_array is a property. Lightning's summary would call the module "
                f"with it outside of a step, where parameters aren't gathered: use Trainer(enable_model_summary=False)."
            ) from None
        self._example_back.callback(setattr, module, "example_input_array", example)

    @override
    def on_train_start(self) -> None:
        self._example_back.close()

    # -- a batch -------------------------------------------------------------------------------------------------

    def _gathered(self, module: nn.Module, unit: nn.Module, args: Any) -> None:
        """Begin to watch a unit's parameters for writes. They are whole now, and its forward is about to run."""
        writes = self._writes[torch.is_grad_enabled()]
        if writes.is_on and not self._guard.is_open:  # in a backward a unit runs again, perhaps not to its end
            own = set(unit.parameters()) - set(self.local_model.replicated.values())
            named = module.named_parameters()
            writes.begin({name: p for name, p in named if p in own and not isinstance(p, DTensor)})

    def _about_to_free(self, module: nn.Module, unit: nn.Module, args: Any, output: Any) -> None:
        self._writes[torch.is_grad_enabled()].end(module.named_parameters())

    @override
    def run_step(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        if self.holds_all:
            return super().run_step(kind, *args, **kwargs)
        # As for writes to gathered parameters, the first steps are watched.
        is_watched = kind == "training_step" and self._writes[True].is_on
        with _explained(), self._watch if self._watch is not None and is_watched else nullcontext():
            output = super().run_step(kind, *args, **kwargs)
        if kind != "training_step":
            self._uses.compare()
            self._writes[False].check()
            self._free()  # after training steps the backward does it
        return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self.holds_all:
            self._uses.compare(closure_loss)

    @override
    def make_gradients(self, backward: Callable[[], None]) -> None:
        """Run the backward, and average the gradients of parameters that every rank holds whole."""
        if self.holds_all:
            return backward()
        self._writes[True].check()
        whole = self.local_model.replicated
        accumulated = swap_gradients(whole, {})  # of earlier batches: means already
        with _explained(), self._guard.open():
            backward()
        add_gradients(whole, self.replicas.averaged(swap_gradients(whole, accumulated)))
        self.watch_gradients()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._root is None:
            self._free()  # with reshard_after_forward=False, what no backward has freed would be used as it was
        return output

    def _free(self) -> None:
        for unit in self._units:
            unit.reshard()

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._fully_sharded = None  # over groups that are closed now
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._root is not None:
            refuse_calls(self._outside, self._at_next_run)


def find_units(
    module: nn.Module, patterns: Sequence[str] | None = None, *, manual: bool = False
) -> dict[str, nn.Module]:
    """The units of a model, by name, those inside another one first.

    Args:
        patterns: the setting ``units``.
        manual: optimization is manual, so there is no root around the units, and by default networks are units too.

    Raises:
        ValueError: a pattern matches nothing, or a unit is inside another.
    """
    if patterns is not None:
        return untied(module, named_layers(module, patterns, "units") or [])
    if not manual:
        return untied(module, Layers(module, None).in_lists())
    names = []
    for name, network in networks(module).items():
        names += [*(f"{name}.{layer}" for layer in Layers(network, None).in_lists()), name]
    return untied(module, names)


_LOST = (
    "A step changes '{}' in place. It sees the parameter gathered, and this copy is freed: the change would be lost. "
    "Compute with another tensor, as in F.linear(x, self.weight * self.mask), or change it in on_train_batch_start, "
    "where each rank has its part. Or use strategy='ddp'."
)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        for problem, words in _PROBLEMS.items():
            if problem in str(error):
                raise RuntimeError(words) from error
        raise


_PROBLEMS = {
    "mixed torch.Tensor and DTensor": (
        "A parameter was used while it was sharded: its unit's `forward` was not running. A unit's weights can "
        "only be used inside its `forward`. Name other modules in `units`, so that this parameter lies in none; by "
        "default the layers of lists are units. A penalty over all weights needs strategy='ddp'. With manual "
        "optimization the module's children are units: name the layers of a child that the step doesn't call."
    ),
    "appears to not have been used in the graph": (
        "A step differentiates by a tensor that it doesn't depend on. fully_shard hands a unit new tensors for those "
        "that want a gradient, also for those in a dictionary. So a unit's input can't be differentiated by after a "
        "later unit has run (forces): leave the modules that it passes out of `units`, or use strategy='ddp'."
    ),
}
