"""Fully sharded data parallelism: a share of every batch, and a part of every parameter, on each rank.

The parameters are divided unit by unit (``set_up/unit_shards.py``). torch's ``fully_shard`` hooks into ``forward``, but
Lightning calls ``training_step``. So the steps are called through the forward of a root around the module, as Lightning
does with DDP's wrapper::

    Lightning            here
    training_step        the root gathered, the user's step; each unit gathered while it runs
    backward             autograd, which reduces each unit's gradients; those of whole parameters averaged here
    clip, step           of this rank's parts, by the norm of the whole model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.callbacks.start_table import Holding
from lightning_parallel.checks.manual import BackwardGuard
from lightning_parallel.gradients.swapping import add_gradients, swap_gradients
from lightning_parallel.private.lightning.launching import callbacks_of
from lightning_parallel.ranks.local_model import LocalModel
from lightning_parallel.set_up.options import ProcessOptions
from lightning_parallel.set_up.part_of_model import configure_part, move_others, refuse_calls
from lightning_parallel.set_up.unit_shards import UnitShards
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

    @takes(FullyShardedOptions)
    def __init__(self, options: FullyShardedOptions) -> None:
        super().__init__(options, data=options.data_parallel)
        self._guard = BackwardGuard()
        self._shards = UnitShards(options.units, options.reshard_after_forward, options.cpu_offload, self._guard)
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
        self._shards.divide(run)
        if self._shards.root is not None:
            self.model = self._shards.root
        local = LocalModel.of(module)
        self.hold(local)
        if run.trains:
            self.replicas.begin(self._at_end, watch=False)
            if self._shards.root is not None:
                self._take_example(trainer)
                self._at_end.callback(self._example_back.close)
            self._guard.begin([] if module.automatic_optimization else local.replicated.values(), self._at_end)
        self.begin_averages()

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
        super().on_train_start()

    # -- a batch -------------------------------------------------------------------------------------------------

    @override
    def run_step(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        if self.holds_all:
            return super().run_step(kind, *args, **kwargs)
        # As for writes to gathered parameters, the first steps are watched.
        is_watched = kind == "training_step" and self._shards.writes[True].is_on
        with _explained(), self._watch if self._watch is not None and is_watched else nullcontext():
            output = super().run_step(kind, *args, **kwargs)
        if kind != "training_step":
            self._shards.uses.compare()
            self._shards.writes[False].check()
            self._shards.free()  # after training steps the backward does it
        return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self.holds_all:
            self._shards.uses.compare(closure_loss)

    @override
    def make_gradients(self, backward: Callable[[], None]) -> None:
        """Run the backward, and average the gradients of parameters that every rank holds whole."""
        if self.holds_all:
            return backward()
        self._shards.writes[True].check()
        whole = self.local_model.replicated
        accumulated = swap_gradients(whole, {})  # of earlier batches: means already
        with _explained(), self._guard.open():
            backward()
        add_gradients(whole, self.replicas.averaged(swap_gradients(whole, accumulated)))

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._shards.root is None:
            self._shards.free()  # with reshard_after_forward=False, what no backward has freed would be used as it was
        return output

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._shards.module = None  # over groups that are closed now
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self._shards.root is not None:
            refuse_calls(self._shards.outside, self._at_next_run)


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
