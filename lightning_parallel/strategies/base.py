"""What all strategies with a process on each device have in common: launch, ranks, collectives, checkpoints.

A strategy says how large its axes are, and writes its own ``setup`` and steps. It passes this rank's part of the model
to :meth:`LayoutStrategy.hold`, which sets up optimizers, buffers and checkpoints for that part.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.callbacks.defaults import (
    IN_PARTS,
    ON_SEVERAL_RANKS,
    Reasons,
    bring_along,
    refuse_callbacks,
    refuse_saves_after_errors,
)
from lightning_parallel.callbacks.start_table import Holding, tell
from lightning_parallel.checkpoint.background import BackgroundSave
from lightning_parallel.checkpoint.rank_states import take_groups
from lightning_parallel.checkpoint.trainer_checkpoints import Checkpoints, is_directory, refuse_writer
from lightning_parallel.checks.error_notes import explain
from lightning_parallel.checks.optimizer_trial import stepped_whole
from lightning_parallel.checks.other_lightning import warn_of_other_modules
from lightning_parallel.checks.parted_options import PartedOptions
from lightning_parallel.checks.reads_of_shards import sizes_watched
from lightning_parallel.disk_offload import DiskOffload
from lightning_parallel.gradients.clipping import Clipping
from lightning_parallel.gradients.hook_watch import GradientWatch, refuse_hooks_of_parameters
from lightning_parallel.loading import loaders
from lightning_parallel.optimizers.owners import give_owners
from lightning_parallel.private.lightning.batches import refuse_validation_by_time, where_loaders_end
from lightning_parallel.private.lightning.data import take_back_loaders
from lightning_parallel.private.lightning.launching import (
    ScriptLauncher,
    asked_weights_only,
    callbacks_of,
    launched_by_make_launcher,
    layer_sync_of,
    move_optimizers,
)
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.groups import group_of_members
from lightning_parallel.private.torch.tensors import values_read_by
from lightning_parallel.ranks import process_group
from lightning_parallel.ranks.collectives import broadcast_tensors, together
from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout, Size
from lightning_parallel.ranks.local_model import LocalModel, whole
from lightning_parallel.ranks.run import Run
from lightning_parallel.ranks.user_collectives import Collectives
from lightning_parallel.results.metric_sync import gather_within
from lightning_parallel.set_up.averages import leave_out_copies, take_part
from lightning_parallel.set_up.options import ProcessOptions
from lightning_parallel.set_up.original_names import OriginalNames
from lightning_parallel.set_up.part_of_model import attributes_kept, move_others, refuse_copies
from lightning_parallel.set_up.replicas import Replicas

T = TypeVar("T")


@launched_by_make_launcher
class LayoutStrategy(ParallelStrategy):
    """Base of the strategies that run a process on each device. ``axes`` are the sizes that the user gave, by name of
    the axis."""

    calls_configure_part = True  # of a module (set_up/part_of_model.py), which asks for this
    gradients_on_parameters = True  # do backwards add to `p.grad`?
    run: Run  # from `prepare` on
    _original_names: OriginalNames  # of its module's parameters
    # From `hold` on: this rank's parameters and buffers, its replica beside the others, what saves and loads them, and
    # what clips their gradients.
    local_model: LocalModel
    replicas: Replicas
    checkpoints: Checkpoints
    clipping: Clipping

    def __init__(self, options: ProcessOptions, **axes: Size) -> None:
        warn_of_other_modules()
        super().__init__(
            accelerator=options.accelerator,
            parallel_devices=options.parallel_devices,
            cluster_environment=options.cluster_environment,
            checkpoint_io=options.checkpoint_io,
            precision_plugin=options.precision_plugin,
        )
        self.options = options
        self.disk_offload = DiskOffload()
        self._axes: Mapping[str, Any] = axes
        self.num_nodes = 1  # the Trainer sets its own
        self._layout: Layout | None = None
        self._seed = 0
        # From the moment when this process joins the others until it leaves them, for all runs between. The second one
        # writes checkpoints while training goes on; None: training waits for them.
        self._collectives: Collectives | None = None
        self._background: BackgroundSave | None = None
        self._holds_part = False  # has `hold` been called in this run?
        self._group_names: list[list[list[str]]] = []
        # The divided parameters that one rank steps as a whole, by name: is it this one? It alone has their optimizer
        # state.
        self.owned: dict[str, bool] = {}
        self._told: tuple[Any, bool] = (None, False)  # of which module the start table is, and of a training?
        self._same_batches: loaders.SameBatches | None = None
        self._doubtful: set[int] = set()  # the ids of loaders that may end early on a replica
        self._options_used: PartedOptions | None = None  # by replicas, in training
        self._watch: GradientWatch | None = None  # of parts of the model's gradients, in training
        self._at_end = ExitStack()  # undoes what set-up has done, in reverse order
        self._at_next_run = ExitStack()  # undoes what the end of a run has done

    # -- which rank this is --------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The layout as this rank sees it. Known from the moment the Trainer is made."""
        rank = super().global_rank
        if self._layout is None or self._layout.rank != rank:
            self._layout = Layout.resolve(self.num_processes * self.num_nodes, rank, **self._axes)
        return self._layout

    @property
    @override
    def global_rank(self) -> int:
        """This rank; in a step, or a hook that makes loaders, its place on the data axis
        (:mod:`lightning_parallel.ranks.user_collectives`)."""
        return self.layout.index("data") if self._counts_replicas else super().global_rank

    @property
    @override
    def world_size(self) -> int:
        """The number of ranks; in a step, or a hook that makes loaders, of those on the data axis."""
        return self.layout.size("data") if self._counts_replicas else super().world_size

    @property
    @override
    def is_global_zero(self) -> bool:
        """Is this the first rank? In a step, the first of the data axis."""
        inside_step = self._collectives is not None and self._collectives.inside is not None
        return self.global_rank == 0 if inside_step else super().global_rank == 0

    @property
    def _counts_replicas(self) -> bool:
        return self._collectives is not None and self._collectives.counts_replicas

    @property
    def groups(self) -> Groups:
        """The process groups, from the launch on."""
        return self.collectives.groups

    @property
    def collectives(self) -> Collectives:
        """The collectives that Lightning and the user's code ask for, from the launch on."""
        assert self._collectives is not None, "processes join in setup_environment"
        return self._collectives

    @property
    def is_distributed(self) -> bool:
        """Lightning reads this attribute to decide whether to put in distributed samplers. With one replica there is
        nothing to divide: every rank iterates the user's own loader, as a single process does."""
        return self.layout.size("data") > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # The ranks of one replica see the same samples in the same order.
        return {"num_replicas": self.layout.size("data"), "rank": self.layout.index("data")}

    @property
    def batches_ahead(self) -> int:
        """The number of batches by which a rank may be ahead of another one in training."""
        return 0

    @property
    def holds_all(self) -> bool:
        """Does every rank hold all of the model?"""
        return len(self.layout.model_peers()) == 1

    @property
    def saves_as_lightning(self) -> bool:
        """Are checkpoints saved and loaded as by Lightning's own strategies, without the states of generators?"""
        return self.holds_all and self.options.checkpoint != "directory"

    @property
    def refused_callbacks(self) -> Reasons:
        """Callbacks that several ranks refuse. Where each holds all of the model, most work as under DDP; but a
        checkpoint in parts has the names and groups of the start, which they change."""
        return ON_SEVERAL_RANKS if self.saves_as_lightning else IN_PARTS

    # -- launch --------------------------------------------------------------------------------------------------

    def make_launcher(self) -> Any:
        """Lightning's last call while it makes the Trainer: settings can be refused here, before any process starts."""
        assert self.cluster_environment is not None
        Layout.resolve(self.num_processes * self.num_nodes, **self._axes)
        if layer_sync_of(self) is not None:
            raise ValueError(
                f"sync_batchnorm=True: under {type(self).__name__} BatchNorm normalises over one microbatch or "
                f"one replica's samples. Leave the setting out, or use strategy='ddp'."
            )
        return ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Set this process's rank in the cluster environment and in Lightning's helpers."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None and self.lightning_module is not None
        bring_along(self.lightning_module.trainer)
        wait, device = self.options.timeout, self.root_device
        timeout = wait if isinstance(wait, timedelta) else timedelta(seconds=wait)
        backend = self.options.process_group_backend or process_group.backend_for(self.parallel_devices or [], device)
        if process_group.join(self.cluster_environment, self.layout, backend, timeout) or self._collectives is None:
            self._collectives = Collectives(self.layout, Groups(self.layout, timeout, device), device)
            if self.options.async_save:
                everyone = range(self.layout.world_size)
                self._background = BackgroundSave(group_of_members(everyone, timeout, "gloo", "saves"))
        owners = self.lightning_module, getattr(self.lightning_module.trainer, "datamodule", None)
        self._at_end.callback(loaders.data_hooks_inside(owners, self.collectives))
        if not self.saves_as_lightning:
            leave_out_copies(callbacks_of(self.lightning_module.trainer), self._at_end)
        self._seed = process_group.agree_on_seed(self.layout)
        self._holds_part = False

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._same_batches is not None:
            self._same_batches.agree()  # what Lightning does next is to make the first epoch's iterator
        prepared = loaders.prepare(dataloader, self.layout)
        if self._same_batches is not None:
            self._doubtful.discard(id(prepared))  # of a loader that is no more
            self._doubtful.update([id(prepared)] if loaders.may_end_early(prepared) else [])
        return prepared

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """The context around ``configure_model()``, also given by ``trainer.init_module()``: large tensors that are
        made inside lie in files, until :meth:`hold` brings this rank's part into memory."""
        # They are made on the CPU: a GPU needs room for this rank's part only.
        with super().tensor_init_context(empty_init), torch.device("cpu"), self.disk_offload:
            yield

    # -- set-up: a strategy's `setup` calls these, in this order -------------------------------------------------

    def prepare(self, trainer: pl.Trainer) -> Run:
        """Begin a run: the accelerator, the precision, metrics. Its module is whole and unmoved."""
        assert self.accelerator is not None and self.lightning_module is not None
        self._at_next_run.close()
        self.run = run = Run(
            trainer,
            self.lightning_module,
            self.layout,
            self.groups,
            self.collectives,
            self.root_device,
            self.precision_plugin,
            self._seed,
            ahead=lambda: self.batches_ahead,
        )
        is_alone = self.layout.world_size == 1
        if not is_alone or not self.holds_all:
            refuse_callbacks(callbacks_of(trainer), self.refused_callbacks, type(self).__name__)
        if not is_alone:
            if run.trains:
                refuse_validation_by_time(trainer)
            if run.trains and not self.saves_as_lightning:
                refuse_saves_after_errors(callbacks_of(trainer))
                refuse_writer(self.checkpoint_io)
        if run.trains:
            refuse_hooks_of_parameters(run.module)
        if self.layout.size("data") == 1:
            # The warning is right for several replicas. With one, what is logged is already the whole.
            warnings.filterwarnings("ignore", message=r".*self\.log\(.*sync_dist=True")
        self._original_names = OriginalNames(run.module.named_parameters(), type(self).__name__)
        self.accelerator.setup(trainer)
        self._at_end.callback(take_back_loaders, trainer)
        if self._background is not None:
            self._at_end.callback(self._background.take_names(callbacks_of(trainer)))
        self._at_end.callback(gather_within(run.module, self.groups.along("data")))
        self._same_batches = loaders.SameBatches(run)
        self._at_end.callback(self._same_batches.end)
        self._at_end.callback(where_loaders_end(trainer, partial(self._refuse_end_of_some, ended=True)))
        with self.disk_offload:  # it may be a copy of the whole model, in another precision
            self.model = self.precision_plugin.convert_module(run.module)
        # The precision plugin's alone, so that what wraps or counts Lightning's `Strategy.backward` sees that.
        own_backward = self.precision_plugin.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self.make_gradients(partial(own_backward, *args, **kwargs))
            # From here until the optimizer steps, the user's code may read the complete gradients.
            if self._watch is not None and self.gradients_on_parameters:
                self._watch.begin()

        self._at_end.callback(replaced(self.precision_plugin, "backward", backward))
        return run

    def hold(self, local: LocalModel) -> None:
        """Take this rank's part of the divided model: move it to its device, make the optimizers for it, and make equal
        what several replicas hold."""
        run = self.run
        self.local_model = local
        self.replicas = Replicas(local, run.module, self.groups.along("data"))
        self.checkpoints = Checkpoints(
            local,
            self.layout.coordinate,
            self._group_names,
            self.owned,
            self._background,
            as_lightning=self.checkpoint_io if self.saves_as_lightning else None,
        )
        self._holds_part = True
        together(None, partial(self._original_names.refuse_kept, run.module))
        if local.is_fully_sharded:
            refuse_copies(run.module)
            self._at_end.enter_context(values_read_by(lambda tensor: whole(tensor).item()))
        self.model_to_device()
        self.disk_offload.load()
        if run.trains:
            together(None, lambda: self.checkpoints.state_dict(run.module))  # refused before training
            self.setup_optimizers(run.trainer)
        self.setup_precision_plugin()
        if run.trains:
            move_optimizers(self.optimizers, self.root_device)
            if self.layout.size("data") > 1:
                replicas, everyone = self.layout.peers("data"), range(self.layout.world_size)
                self._options_used = PartedOptions(self.groups.on_host(replicas), self.groups.on_host(everyone))
            in_parts = self.layout.size("pipeline") > 1 or bool(local.shards)  # not with plan="none"
            if local.is_fully_sharded or in_parts:
                self._watch = GradientWatch(run, local.parameters.values(), in_parts=in_parts)
                self._at_end.callback(self._watch.close)
        self.clipping = Clipping(
            run, local, counts=self.counts, parts=self.norm_group, watch=self._watch, until=self._at_end
        )
        self.replicas.copy_parameters()
        module, of_training = self._told
        if module is not run.module or run.trains > of_training:  # again when one that was evaluated is trained
            self._told = run.module, run.trains
            tell(run, self.holding(), local, self.optimizers)  # the groups have met: it tells what they hold

    def begin_averages(self) -> None:
        """Let a callback average this rank's part. It is a strategy's last call in ``setup``."""
        if not self.saves_as_lightning:
            self.checkpoints.average = take_part(
                self.run, self.local_model, type(self).__name__, self.after_last_update, self._at_end
            )

    def after_last_update(self) -> list[Callable[[], Any]] | None:
        """What this rank will call after the last update that Lightning has counted; None if the update is made."""
        return None

    def counts(self, name: str) -> bool:
        """Does this rank's copy of a parameter enter the norm for clipping?"""
        return True

    @property
    def norm_group(self) -> dist.ProcessGroup:
        """The ranks whose gradients make one norm for clipping."""
        return self.groups.model

    @abstractmethod
    def holding(self) -> Holding:
        """This rank's part of the model, as the table at the start describes it."""

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        if all(each.device == self.root_device for each in chain(self.model.parameters(), self.model.buffers())):
            return move_others(self.run.module, self.root_device)
        with attributes_kept(self.model):  # DTensors lose theirs
            self.model.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """``configure_optimizers`` sees the whole model's parameters; then those of other ranks are dropped."""
        hook = "configure_optimizers"  # which may scale a rate by the number of replicas
        shards = list(self.local_model.shards) if self._holds_part else []
        with self._inside_step(hook), sizes_watched(trainer.lightning_module, shards, hook):
            super().setup_optimizers(trainer)
        if self._holds_part:  # a callback may want optimizers outside of a run
            groups = together(None, self._take_optimizers)
            self.owned.clear()
            self.owned.update(give_owners(self.optimizers, groups, self.run, self.local_model, self._at_end))

    def _inside_step(self, name: str) -> AbstractContextManager[None]:
        """Collectives.inside_step; outside of a run this rank is alone, and there is nothing to see otherwise."""
        return nullcontext() if self._collectives is None else self._collectives.inside_step(name)

    def _take_optimizers(self) -> list[set[int]]:
        """Leave the optimizers this rank's parameters. Returns for each the groups that it has to step as wholes."""
        module, local = self.run.module, self.local_model
        self._original_names.rebind(self.optimizers, module)
        self._group_names[:] = take_groups(self.optimizers, module, local)
        if self.layout.stages > 1 or local.shards or local.is_fully_sharded:
            for optimizer in self.optimizers:
                self._original_names.refuse_kept_by(optimizer, module)
        return [self.try_optimizer(optimizer) for optimizer in self.optimizers]

    def try_optimizer(self, optimizer: Optimizer) -> set[int]:
        """The groups that an optimizer has to step as wholes. It is refused if it would train another model here."""
        return stepped_whole(optimizer, self.local_model, self.layout, type(self).__name__)

    # -- buffers -------------------------------------------------------------------------------------------------

    def share_buffers(self) -> None:
        """Copy the first replica's buffers to all replicas, before buffers are used for evaluation or saved."""
        if self._holds_part and self._collectives is not None:
            self.replicas.copy_buffers()
            if self.checkpoints.average is not None:
                peers, first = self.layout.peers("data"), self.layout.rank_at(data=0)
                broadcast_tensors(self.checkpoints.average.module.buffers(), first, self.groups.on_host(peers))

    def _begin_evaluation(self, kind: str) -> None:
        self.drain()
        self.share_buffers()
        batches: Sequence[float] = getattr(self.run.trainer, f"num_{kind}_batches")
        if self._same_batches is not None:
            self._same_batches.begin_evaluation(batches)
        if self.local_model.is_fully_sharded:
            loaders.refuse_unequal_steps(self.run, kind, batches)

    on_validation_start = partialmethod(_begin_evaluation, "val")  # type: ignore[assignment]
    on_test_start = partialmethod(_begin_evaluation, "test")  # type: ignore[assignment]
    on_predict_start = partialmethod(_begin_evaluation, "predict")  # type: ignore[assignment]

    def _refuse_end_of_some(self, *, ended: bool = False) -> None:
        if self.run.trainer.training or self.local_model.is_fully_sharded:  # else replicas don't meet in each batch
            loaders.refuse_end_of_some(self.run, self._doubtful, ended=ended)

    # -- steps ---------------------------------------------------------------------------------------------------

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with self._inside_step("on_after_batch_transfer"):
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.run_step("training_step", *args, **kwargs)

    def _evaluate(self, kind: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._same_batches is not None:
            self._same_batches.check_evaluation(batch)
        self._refuse_end_of_some()
        return self.run_step(kind, batch, *args, **kwargs)

    validation_step = partialmethod(_evaluate, "validation_step")  # type: ignore[assignment]
    test_step = partialmethod(_evaluate, "test_step")  # type: ignore[assignment]
    predict_step = partialmethod(_evaluate, "predict_step")  # type: ignore[assignment]

    def run_step(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step of a kind (its name) on a batch."""
        with self._inside_step(kind):
            return getattr(super(), kind)(*args, **kwargs)

    @abstractmethod
    def make_gradients(self, backward: Callable[[], None]) -> None:
        """Put the gradients of a batch on the parameters, complete. ``backward`` calls the precision plugin's, which
        runs the module's."""

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return not self.saves_as_lightning  # each rank reads its own part, so it has to know which that is

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return self.saves_as_lightning  # else it is read together with the model

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict()``, of which each rank has its part; :meth:`save_checkpoint` joins the parts. It
        is the first call of a save, on all ranks. A rank that holds all of a model without buffers may ask alone."""
        if not self._holds_part:  # `trainer.strategy.connect(module)`, and no run
            return super().lightning_module_state_dict()
        self.drain()
        if self._collectives is not None:
            self.collectives.meet("A checkpoint")
        self.share_buffers()
        return self.checkpoints.state_dict(self.run.module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return super().optimizer_state(optimizer) if self.saves_as_lightning else {}  # else it is collected by name

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a directory with every rank's part, or a file. All ranks call it."""
        if not self._holds_part:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.refuse_parted_options()
        self.checkpoints.save(checkpoint, filepath, self.run.module, self.optimizers, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a directory written under any layout, or a plain file, for the module's ``on_load_checkpoint``."""
        if self.saves_as_lightning:
            is_directory(checkpoint_path)  # a damaged file is refused
            return super().load_checkpoint(checkpoint_path, weights_only)
        if weights_only is None:
            weights_only = asked_weights_only(self)
        return self.checkpoints.load(checkpoint_path, weights_only, self.checkpoint_io)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read this rank's part of the checkpoint."""
        if self.saves_as_lightning:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert isinstance(checkpoint, dict)
        self.checkpoints.take(checkpoint, self.run.module, self.optimizers if self.run.trains else [])

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self.checkpoints.remove(filepath, self.checkpoint_io)

    def ask_hooks(self) -> None:
        """Find out what the user's hooks may see. It is called where training and an epoch begin: a learning-rate
        finder trains without the user's callbacks before."""
        if self._watch is not None:
            self._watch.ask()

    @override
    def on_train_start(self) -> None:
        self.ask_hooks()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        meets = self._same_batches is not None and self._same_batches.check(batch, batch_idx)
        if batch_idx == 0:
            loaders.refuse_unequal_steps(self.run, "train", [self.run.trainer.num_training_batches])
            refuse_hooks_of_parameters(self.run.module)  # that were registered since, in on_train_start
            self.ask_hooks()
        if self._watch is not None:
            self._watch.end()
        if self._options_used is not None:  # there are several replicas
            self._refuse_end_of_some()
            if self.batches_ahead == 0:  # else the backward of a batch under way may read what it would write to
                self.replicas.share_carried(begins_epoch=batch_idx == 0)
            self._options_used.note(self.optimizers)
            if meets:
                self.refuse_parted_options()

    @override
    def on_train_end(self) -> None:
        self.refuse_parted_options()

    def refuse_parted_options(self) -> None:
        """Refuse to go on where replicas have used different options of their optimizers. All ranks call it."""
        if self._options_used is not None:
            self._options_used.refuse(self.lr_scheduler_configs)

    def drain(self) -> None:
        """Finish what stages have begun of later batches, until nothing is in flight. All ranks call it after the same
        batch."""

    # -- collectives ---------------------------------------------------------------------------------------------
    # Before the processes have joined, and after an error, this rank is alone.

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return tensor if self._collectives is None else self.collectives.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        over = None if self._collectives is None else self.collectives.replicas_or(group)
        return tensor if over is None else super().all_gather(tensor, over, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._collectives is None else self.collectives.decide(decision, all)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._collectives is not None:
            self.collectives.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj if self._collectives is None else self.collectives.broadcast(obj, src)

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Close the connections, and save nothing any more that would need other ranks. When this process ends, they
        notice it (:func:`.process_group.close` says when)."""
        if self._collectives is not None:
            explain(exception, self.layout)
        self._options_used = None  # a callback that saves now may be alone
        if self._watch is not None:
            self._watch.close()
        if self._holds_part and not self.saves_as_lightning:
            self.checkpoints.have_failed = True
        if self._background is not None:
            try:
                self._background.finish()
            except RuntimeError as error:  # the exception ends the run, whatever came of the save
                rank_zero_warn(str(error))
        self._collectives = self._background = None  # nothing may refer to a group that is destroyed
        process_group.close()

    @override
    def teardown(self) -> None:
        self.end_run()
        module = self.lightning_module
        if module is None or not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return super().teardown()
        # Lightning's, without the move to the CPU: fully_shard doesn't move back, and recurrent layers can't be moved.
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def end_run(self) -> None:
        """Make the module as it was before the run, except that each rank has its part only. Every strategy's
        ``teardown`` calls it, also after an error."""
        self._at_end.close()
        self._same_batches = self._watch = self._options_used = None
        if self._background is not None:
            self._background.finish()
