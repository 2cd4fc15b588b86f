"""What the synchronous and the asynchronous pipeline share: from the user's module to a stage that runs in Lightning.

A batch's way through a step: ``training_step`` (of the subclass) splits it into microbatches, the engine runs the
schedule's actions on them, each calling the user's own ``training_step`` on this rank's stage; the last stage, on
global rank 0, logs and returns the loss.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.pipeline import microbatch as batches
from lightning_parallel.pipeline import timeline as timelines
from lightning_parallel.pipeline.engine import Engine, Microbatch
from lightning_parallel.pipeline.flow import Flow
from lightning_parallel.pipeline.logs import LogRecorder
from lightning_parallel.pipeline.random import host_generators_kept, mix, seed_host_generators, seeded
from lightning_parallel.pipeline.timeline import Timeline
from lightning_parallel.pipeline.weights import Weights
from lightning_parallel.strategies.metrics import (
    OUTPUT_HOOKS,
    LossOnly,
    MetricBoard,
    PublishMetrics,
    discard,
    logging_through,
    named_loss_of_peers,
    unwrap_hooks,
    wrap_hooks,
)
from lightning_parallel.strategies.staged import StagedStrategy

Microbatches = int | Literal["auto"]


class PipelineBase(StagedStrategy):
    """Common part of :class:`PipelineStrategy` and :class:`AsyncPipelineStrategy`."""

    def __init__(
        self,
        *,
        microbatches: Microbatches,
        timeline: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        whole = isinstance(microbatches, int) and not isinstance(microbatches, bool)
        if microbatches != "auto" and not (whole and int(microbatches) >= 1):
            raise ValueError(f"microbatches={microbatches!r}: give a positive integer or 'auto'.")
        self._microbatches = microbatches
        self._timeline = Timeline(enabled=timeline)
        self._engine: Engine | None = None
        self._board: MetricBoard | None = None
        self._publisher = PublishMetrics(self._publish, self.on_exception)
        self._flows: dict[str, Flow] = {}  # by the kind of step
        self._batches_seen = 0
        self._evaluations = 0
        self._alone_in: str | None = None  # a hook or step that reaches its end on the last stage only

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
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self.layout.pipeline > 1:
            wrap_hooks(self._module(), self._last_stage_hook)
            _callbacks(trainer).insert(0, self._publisher)
        if not self.stage.is_last:
            self._module().log = discard  # type: ignore[method-assign]  # until teardown
        self._batches_seen = 0
        self._flows = {}
        last = self.layout.rank_of(stage=self.layout.pipeline - 1)
        self._board = MetricBoard(trainer, self.groups.pipeline, last, self.root_device)
        self._synchronise_metrics_over_replicas()
        self._engine = Engine(
            self.stage,
            self.layout,
            self.groups,
            self.root_device,
            loss_of=_loss_of,
            weights=self.make_weights(),
            timeline=self._timeline,
        )

    def make_weights(self) -> Weights | None:
        """Which weights the engine's forwards use; None: the module's own."""
        return None

    def _synchronise_metrics_over_replicas(self) -> None:
        """torchmetrics' objects reduce over the world by default, where only last stages have updated them."""
        for child in self._module().modules():
            if hasattr(child, "process_group") and hasattr(child, "sync_on_compute") and child.process_group is None:
                child.process_group = self.groups.data

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
        seeds = [mix(self.seed, self.layout.data_rank, batch_number, k) for k in range(count)]
        work = {
            first + k: Microbatch(
                step=partial(self._user_step, (part, *rest), recorder, sizes[k], seeds[k]),
                weight=sizes[k] / size * scale,
                place=k,
                seed=seeds[k],
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
            with logging_through(self._module(), discard), host_generators_kept():
                self._flows[kind] = self.stage.survey(step)
        self.stage.flow = self._flows[kind]

    def _user_step(self, arguments: tuple[Any, ...], recorder: LogRecorder, size: int, seed: int) -> Any:
        recorder.weight = size
        seed_host_generators(seed)
        with self.precision_plugin.train_step_context():
            return self._module().training_step(*arguments)

    @contextlib.contextmanager
    def recorded(self, recorder: LogRecorder) -> Iterator[None]:
        """``self.log`` inside microbatches: kept by the recorder on the last stage, dropped on the others."""
        log = logging_through(self._module(), recorder.log) if self.stage.is_last else contextlib.nullcontext()
        with log, self._alone("training_step"):
            yield

    def _check_same_batch(self, batch: Any) -> None:
        """Do all stages see the same first batch? A loader shuffled differently on each rank would train nonsense."""
        digest = hashlib.blake2b(digest_size=7)  # 56 bits: its negative fits into a signed word too
        for tensor in batches.tensors(batch):
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        number = int.from_bytes(digest.digest(), "little")
        mine = torch.tensor([number, -number], device=self.root_device)
        with named_loss_of_peers():
            dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.groups.pipeline)
        highest, lowest = mine.tolist()
        if highest != -lowest:
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
        with self._alone(step.__name__, *(index for index in args[1:] if isinstance(index, int))):
            return self.engine.evaluate(bound, self._evaluations)

    # -- hooks and metrics ---------------------------------------------------------------------------------------

    def _last_stage_hook(self, name: str, hook: Callable[..., Any], *args: Any) -> None:
        """The user's hook on what the steps made: on the last stage, which has it."""
        if name == "on_train_batch_end":
            outputs, *rest = args
            hook(outputs if self.stage.is_last else LossOnly(outputs or {}), *rest)
            return
        if self.stage.is_last:
            with self._alone(name):
                hook(*args)
        if name not in OUTPUT_HOOKS:
            self._publish(name)

    @contextlib.contextmanager
    def _alone(self, name: str, *indices: int) -> Iterator[None]:
        """Inside, the user's code may run on the last stage only: it can't meet the other ranks, and what it draws
        must not move the generators that the data come from."""
        seed = mix(self.seed, self.layout.data_rank, self._module().trainer.global_step, *indices)
        self._alone_in = name
        try:
            with seeded(seed, self.root_device), host_generators_kept():
                seed_host_generators(seed)
                yield
        finally:
            self._alone_in = None

    def _publish(self, hook: str) -> None:
        if hook == "on_train_epoch_end":
            self.board.publish()
        elif hook in ("on_validation_epoch_end", "on_test_epoch_end"):
            self.board.publish_evaluation()
        elif hook == "on_train_batch_end" and self.read_after_this_batch():
            self.board.publish()

    def read_after_this_batch(self) -> bool:
        """Does a callback or a scheduler of Lightning's read a training metric now, and act on it?"""
        trainer = self._module().trainer
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
                every = callback._every_n_train_steps
                if every >= 1 and trainer.global_step % every == 0:
                    return True
                if callback._train_time_interval is not None:
                    return True
        batch_number = trainer.fit_loop.epoch_loop.batch_idx + 1
        return any(
            config.reduce_on_plateau and config.interval == "step" and batch_number % config.frequency == 0
            for config in self.lr_scheduler_configs
        )

    def _meet(self, what: str) -> None:
        if self._alone_in is not None and self.layout.pipeline > 1:
            raise RuntimeError(
                f"{what} needs every rank, but {self._alone_in} reaches its end on the last pipeline stage only (rank "
                f"{self.layout.rank_of(stage=self.layout.pipeline - 1)}): what it works on exists there alone. Do this "
                f"in on_train_batch_end, or in a callback."
            )

    @override
    def barrier(self, name: str | None = None) -> None:
        self._meet("A barrier")
        with named_loss_of_peers():
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._alone_in is not None and src == self.global_rank:
            return obj  # trainer.log_dir is one
        self._meet("A broadcast")
        with named_loss_of_peers():
            return super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._meet("A decision of all ranks")
        with named_loss_of_peers():
            return super().reduce_boolean_decision(decision, all)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._meet("A checkpoint")
        super().save_checkpoint(checkpoint, filepath, storage_options)

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
    def on_exception(self, exception: BaseException) -> None:
        self._engine = None  # its links hold connections, whose end is what the neighbours notice
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._stage is not None:
            unwrap_hooks(self._module())
            self._module().__dict__.pop("log", None)
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


def loss_scale(strategy: PipelineBase) -> float:
    """Factor that fp16's gradient scaler wants on the loss; 1 in any other precision."""
    plugin = strategy.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return 1.0 if scaler is None else float(scaler.get_scale())
