"""What the synchronous and the asynchronous pipeline share: from the user's module to a stage that runs in Lightning.

A batch's way through a step: ``training_step`` (of the subclass) splits it into microbatches, the engine runs the
schedule's actions on them, each calling the user's own ``training_step`` on this rank's stage; the last stage, on
global rank 0, logs and returns the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import checkpoint as checkpoints
from lightning_parallel.layout import Size
from lightning_parallel.pipeline import microbatch as batches
from lightning_parallel.pipeline import timeline as timelines
from lightning_parallel.pipeline.absent import AbsentTensor
from lightning_parallel.pipeline.engine import Engine, Microbatch
from lightning_parallel.pipeline.flow import Flow
from lightning_parallel.pipeline.logs import LogRecorder
from lightning_parallel.pipeline.partition import Balance, Partition, partition
from lightning_parallel.pipeline.random import mix
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.timeline import Timeline
from lightning_parallel.pipeline.weights import Weights
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.strategies.checkpointing import StageCheckpoint
from lightning_parallel.strategies.metrics import (
    MetricBoard,
    PublishMetrics,
    discard,
    logging_through,
    unwrap_epoch_end_hooks,
    wrap_epoch_end_hooks,
)

Microbatches = int | Literal["auto"]


class PipelineBase(LayoutStrategy):
    """Common part of :class:`PipelineStrategy` and :class:`AsyncPipelineStrategy`."""

    def __init__(
        self,
        *,
        stages: Size,
        microbatches: Microbatches,
        layers: Sequence[str] | None,
        balance: Balance,
        activation_checkpointing: bool,
        timeline: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        whole = isinstance(microbatches, int) and not isinstance(microbatches, bool)
        if microbatches != "auto" and not (whole and int(microbatches) >= 1):
            raise ValueError(f"microbatches={microbatches!r}: give a positive integer or 'auto'.")
        self._stages = stages
        self._microbatches = microbatches
        self._layers = list(layers) if layers is not None and not isinstance(layers, str) else layers
        self._balance = balance
        self._activation_checkpointing = activation_checkpointing
        self._timeline = Timeline(enabled=timeline)
        self._stage: Stage | None = None
        self._partition: Partition | None = None
        self._engine: Engine | None = None
        self._board: MetricBoard | None = None
        self._publisher = PublishMetrics(self._publish)
        self._parameters: dict[str, nn.Parameter] = {}
        self._shared: list[tuple[dist.ProcessGroup, list[str]]] = []  # what several stages hold, with their group
        self._group_names: list[list[str]] = []  # of the whole model, for each parameter group of the optimizer
        self._flows: dict[str, Flow] = {}  # by the kind of step
        self._batches_seen = 0
        self._evaluations = 0
        self._alone_in: str | None = None  # a hook that runs on the last stage only

    @override
    def axes(self) -> Mapping[str, Size]:
        return {"pipeline": self._stages}

    @property
    def stage(self) -> Stage:
        """This rank's stage, from set-up on."""
        assert self._stage is not None, "stages are made in Trainer.fit, validate, test and predict"
        return self._stage

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def board(self) -> MetricBoard:
        assert self._board is not None
        return self._board

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def distribute_model(self, trainer: pl.Trainer) -> None:
        module = self._module()
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse(module)
        if self._stage is None or self._stage.module is not module:
            if any(isinstance(p, AbsentTensor) for p in module.parameters()):
                raise RuntimeError(
                    "This LightningModule holds one stage of a pipeline that another Trainer has made of it. Make a "
                    "new one, and load it from a checkpoint."
                )
            self._partition = partition(module, self.layout.pipeline, self._layers, self._balance)
            self.check_partition(self._partition)
            parameters = dict(module.named_parameters())
            sizes = [
                sum(p.numel() for name, p in parameters.items() if stage in self._partition.owners[name])
                for stage in range(self.layout.pipeline)
            ]
            self._stage = Stage(module, self._partition, self.layout.stage, self.root_device)
            self._announce(sizes)
        self.stage.install(self.recompute if self._activation_checkpointing else None)
        if self.layout.pipeline > 1:
            wrap_epoch_end_hooks(module, self._epoch_end)

    def check_partition(self, parts: Partition) -> None:
        """Refuse what this schedule can't train."""

    def _announce(self, sizes: list[int]) -> None:
        assert self._partition is not None
        for stage, size in enumerate(sizes):
            names = [self._partition.layers[i] for i in self._partition.layers_of(stage)]
            outside = [name for name, owner in self._partition.outside.items() if owner == stage]
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} layers)"
            beside = f" with {', '.join(outside)}" if outside else ""
            rank_zero_info(
                f"{self.layout.describe(self.layout.rank_of(stage=stage))}: {span}{beside}, {size:,} parameters"
                + self.describe_stage(stage)
            )

    def describe_stage(self, stage: int) -> str:
        """What the banner says of a stage beside its layers."""
        return ""

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._parameters = self.stage.named_parameters()
        self._batches_seen = 0
        self._flows = {}
        last = self.layout.rank_of(stage=self.layout.pipeline - 1)
        self._board = MetricBoard(trainer, self.groups.pipeline, last, self.root_device)
        if self.layout.pipeline > 1:
            _callbacks(trainer).insert(0, self._publisher)
        self._synchronise_metrics_over_replicas()
        self._join_shared_parameters()
        self._engine = Engine(
            self.stage,
            self.layout,
            self.groups,
            self.root_device,
            loss_of=_loss_of,
            weights=self.make_weights(),
            timeline=self._timeline,
        )

    def _join_shared_parameters(self) -> None:
        """Tied and loose parameters: made equal on the stages that hold them. Kept, with their groups."""
        by_stages: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self.stage.partition.shared().items():
            by_stages.setdefault(stages, []).append(name)
        self._shared = []
        for stages, names in by_stages.items():
            for place in (self.layout.at(rank) for rank in range(self.layout.world_size)):
                if place.stage != stages[0]:
                    continue
                ranks = [place.rank_of(stage=stage) for stage in stages]
                group = dist.new_group(ranks, timeout=self._timeout)  # by all ranks, in the same order
                if self.layout.rank in ranks:
                    self._shared.append((group, names))
                    for name in names:
                        dist.broadcast(self._parameters[name].data, ranks[0], group)

    def recompute(self) -> contextlib.AbstractContextManager[None]:
        """The context in which activation checkpointing runs layers again."""
        return contextlib.nullcontext()

    def make_weights(self) -> Weights | None:
        """Which weights the engine's forwards use; None: the module's own."""
        return None

    def _synchronise_metrics_over_replicas(self) -> None:
        """torchmetrics' objects reduce over the world by default, where only last stages have updated them."""
        for child in self._module().modules():
            if hasattr(child, "process_group") and hasattr(child, "sync_on_compute") and child.process_group is None:
                child.process_group = self.groups.data

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """``configure_optimizers`` sees the whole model's parameters; then absent ones are dropped."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, which needs manual optimization; a "
                f"pipeline runs the backward itself. Return one optimizer, with parameter groups if need be."
            )
        names = {id(parameter): name for name, parameter in self._module().named_parameters()}
        aliases = self.stage.partition.aliases
        self._group_names = []
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS needs products over the whole model, which a pipeline's stages don't have.")
            for group in optimizer.param_groups:
                listed = [aliases.get(names.get(id(p), ""), "") for p in group["params"]]
                self._group_names.append(list(dict.fromkeys(listed)))
                group["params"] = [p for p in group["params"] if not isinstance(p, AbsentTensor)]
            for parameter in list(optimizer.state):
                if isinstance(parameter, AbsentTensor):
                    del optimizer.state[parameter]

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # The plugin's own sees this stage's gradients only.
        self.precision_plugin.clip_grad_by_norm = self.clip_gradients_by_norm  # type: ignore[method-assign]

    def clip_gradients_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """What ``gradient_clip_val`` with the algorithm "norm" does."""
        parameters = [p for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    # -- training ------------------------------------------------------------------------------------------------

    def microbatch_count(self, batch: Any) -> tuple[int, int]:
        """Size of a batch, and into how many microbatches it is split."""
        size = batches.batch_size(batch)
        wanted = self.wanted_microbatches(size)
        if wanted > size and self._batches_seen == 0:
            raise ValueError(
                f"microbatches={wanted}, but the first batch has only {size} samples: use at most {size} "
                f"microbatches, or a larger batch_size in the DataLoader."
            )
        return size, min(wanted, size)  # the last batch of an epoch may be smaller

    def wanted_microbatches(self, size: int) -> int:
        return size if self._microbatches == "auto" else int(self._microbatches)

    def microbatches(
        self, arguments: tuple[Any, ...], recorder: LogRecorder, scale: float, first: int = 0
    ) -> tuple[dict[int, Microbatch], list[int]]:
        """The work of a batch, by microbatch number from ``first`` on, and the microbatches' sizes.

        Args:
            arguments: of ``training_step``, the batch first.
            scale: factor of the loss beside the microbatch's share of the batch.
        """
        batch, *rest = arguments
        size, count = self.microbatch_count(batch)
        if self._batches_seen == 0:
            self._check_same_batch(batch)
        sizes = batches.sizes(size, count)
        trainer = self._module().trainer
        # Numbered through the whole run, so that a resumed run draws the same random numbers.
        batch_number = trainer.fit_loop.total_batch_idx
        work = {
            first + k: Microbatch(
                step=partial(self._user_step, (part, *rest), recorder, sizes[k]),
                weight=sizes[k] / size * scale,
                place=k,
                seed=mix(self.seed, self.layout.stage, self.layout.data_rank, batch_number, k),
            )
            for k, part in enumerate(batches.split(batch, count))
        }
        self._follow("training_step", work[first].step)
        self._batches_seen += 1
        return work, sizes

    def _follow(self, kind: str, step: Callable[[], Any]) -> None:
        """Before a step of some kind: what crosses the cuts in it? Its first one is surveyed."""
        if self.layout.pipeline == 1:
            return
        if kind not in self._flows:
            with logging_through(self._module(), discard):
                self._flows[kind] = self.stage.survey(step)
        self.stage.flow = self._flows[kind]

    def _user_step(self, arguments: tuple[Any, ...], recorder: LogRecorder, size: int) -> Any:
        recorder.weight = size
        with self.precision_plugin.train_step_context():
            return self._module().training_step(*arguments)

    @contextlib.contextmanager
    def recorded(self, recorder: LogRecorder) -> Iterator[None]:
        """``self.log`` inside microbatches: kept by the recorder on the last stage, dropped on the others."""
        with logging_through(self._module(), recorder.log if self.stage.is_last else discard):
            yield

    def _check_same_batch(self, batch: Any) -> None:
        """Do all stages see the same first batch? A loader shuffled differently on each rank would train nonsense."""
        sums = [float(t.double().abs().sum()) for t in batches.tensors(batch)]
        mine = torch.tensor([sum(sums), -sum(sums)], dtype=torch.float64, device=self.root_device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.groups.pipeline)
        highest, lowest = mine[0].item(), -mine[1].item()
        if highest != lowest:
            raise RuntimeError(
                "The stages see different batches: their first ones differ. Every rank must load the same samples in "
                "the same order: seed the sampler with `seed_everything(...)` or a generator of its own, or leave "
                "`use_distributed_sampler=True`."
            )

    def joined_output(self, outputs: list[Any], sizes: list[int]) -> Any:
        """What training_step would have returned for the whole batch, detached."""
        loss = batches.weighted_mean([_loss_of(output).detach().reshape(()) for output in outputs], sizes)
        joined = batches.join_outputs(outputs, sizes)
        return {**joined, "loss": loss} if isinstance(joined, Mapping) else loss

    # -- evaluation ----------------------------------------------------------------------------------------------

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate(self._module().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate(self._module().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate(self._module().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch streams through undivided, so metrics see what they see in one process; nobody waits for its end."""
        self._evaluations += 1
        bound = partial(step, *args, **kwargs)
        self._follow(f"{step.__name__} {args[2:]}", bound)  # a loader of its own may have a step of its own
        logs = contextlib.nullcontext() if self.stage.is_last else logging_through(self._module(), discard)
        with logs:
            return self.engine.evaluate(bound, self._evaluations)

    @override
    def on_validation_start(self) -> None:
        self.board.evaluation_starts()

    @override
    def on_test_start(self) -> None:
        self.board.evaluation_starts()

    # -- hooks and metrics ---------------------------------------------------------------------------------------

    def _epoch_end(self, name: str, hook: Callable[[], None]) -> None:
        """The user's epoch-end hook: on the last stage, whose steps gathered what it works on."""
        if self.stage.is_last:
            self._alone_in = name
            try:
                hook()
            finally:
                self._alone_in = None
        self._publish(name)

    def _publish(self, hook: str) -> None:
        if hook == "on_train_epoch_end":
            self.board.publish()
        elif hook in ("on_validation_epoch_end", "on_test_epoch_end"):
            self.board.publish_evaluation()

    def _meet(self, what: str) -> None:
        if self._alone_in is not None:
            raise RuntimeError(
                f"{what} needs every rank, but {self._alone_in} runs on the last pipeline stage only (rank "
                f"{self.global_rank}): what it works on exists there alone. Do this in on_train_batch_end, or in a "
                f"callback."
            )

    @override
    def barrier(self, name: str | None = None) -> None:
        self._meet("A barrier")
        super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._meet("A broadcast")
        return super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._meet("A decision of all ranks")
        return super().reduce_boolean_decision(decision, all)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # each stage reads its own part, so it has to know which that is

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # read together with the model

    def _checkpoint(self) -> StageCheckpoint:
        parameters = self.stage.named_parameters()
        model = {**{n: p.data for n, p in parameters.items()}, **self.stage.named_buffers()}
        return StageCheckpoint(model, parameters, self._group_names, self.layout.coordinate)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This stage's part; :meth:`save_checkpoint` joins the parts."""
        return {**self.stage.named_parameters(), **self.stage.named_buffers()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # collected by name in save_checkpoint

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a directory with every stage's part. Called on all ranks."""
        self._meet("A checkpoint")
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r}: a pipeline's checkpoint is a local directory.")
        self._checkpoint().save(checkpoint, filepath, self.optimizers)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this stage's part of a checkpoint: a directory made under any layout, or a plain file."""
        optimizers = self.optimizers if self._module().trainer.state.fn == TrainerFn.FITTING else []
        trusted = weights_only is False
        part = self._checkpoint()
        if checkpoints.is_checkpoint(checkpoint_path):
            return part.load(checkpoint_path, optimizers, not trusted)
        return part.load_file(self.checkpoint_io, checkpoint_path, optimizers, not trusted)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done in load_checkpoint."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done in load_checkpoint."""

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self.is_global_zero:
            return
        if checkpoints.is_checkpoint(filepath):
            checkpoints.remove(filepath)
        else:
            self.checkpoint_io.remove_checkpoint(filepath)

    # -- the end -------------------------------------------------------------------------------------------------

    def theoretical_bubble(self) -> float | None:
        """Fraction of time that the schedule leaves stages idle."""
        return None

    @override
    def on_train_end(self) -> None:
        if self._timeline.enabled:
            self._write_timeline()

    def _write_timeline(self) -> None:
        trainer = self._module().trainer
        directory = Path(trainer.log_dir or trainer.default_root_dir)
        gathered: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(gathered, (self.layout.stage, self.layout.data_rank, self._timeline.spans))
        if not self.is_global_zero:
            return
        rows = [spans for stage, replica, spans in sorted(gathered, key=lambda row: row[0]) if replica == 0]
        labels = [f"stage {s} (rank {self.layout.rank_of(stage=s)})" for s in range(self.layout.pipeline)]
        directory.mkdir(parents=True, exist_ok=True)
        theory = self.theoretical_bubble()
        timelines.write_png(rows, directory / "timeline.png", title=self.title(), theory=theory, labels=labels)
        timelines.write_perfetto(rows, directory / "timeline.json", labels=labels)
        rank_zero_info(f"{timelines.report(rows, theory)}\nWritten: {directory}/timeline.png and timeline.json")

    def title(self) -> str:
        """Names the schedule in pictures."""
        return f"{self.layout.pipeline} stages"

    @override
    def teardown(self) -> None:
        if self._stage is not None:
            self._stage.remove()
            unwrap_epoch_end_hooks(self._module())
            trainer = self._module()._trainer
            if trainer is not None and self._publisher in _callbacks(trainer):
                _callbacks(trainer).remove(self._publisher)
        super().teardown()


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]  # set by a connector, so untyped


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            f"training_step returned {'no loss' if loss is None else type(loss).__name__}: a pipeline can't skip a "
            f"batch, since every stage has to take part. Return a tensor, or a dict with a tensor under 'loss'."
        )
    if loss.numel() != 1:
        raise RuntimeError(f"training_step returned a loss of shape {tuple(loss.shape)}: return a scalar.")
    if not loss.requires_grad:
        raise RuntimeError(
            "The loss that training_step returned has no gradient: it was detached, or it depends on no trainable "
            "parameter."
        )
    return loss


def _refuse(module: pl.LightningModule) -> None:
    """What no pipeline can run."""
    if not module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False: a pipeline runs backward and step itself, by its schedule. Use automatic "
            "optimization."
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__}.backward is overridden, but a pipeline's schedule runs the backward, stage by "
            f"stage. Remove the override; hooks such as on_after_backward are called as ever."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError("training_step(dataloader_iter): a pipeline splits batches, so it needs training_step(batch).")


def loss_scale(strategy: PipelineBase) -> float:
    """Factor that fp16's gradient scaler wants on the loss; 1 in any other precision."""
    plugin = strategy.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return 1.0 if scaler is None else float(scaler.get_scale())
