"""What the synchronous and the asynchronous pipeline share: from the user's module to a stage that runs in Lightning.

A batch's way through a step: ``training_step`` (of the subclass) splits it into microbatches, the engine runs the
schedule's actions on them, each calling the user's own ``training_step`` on this rank's stage; the last stage, on
global rank 0, logs and returns the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_parallel.pipeline import microbatch as batches
from lightning_parallel.pipeline.drawing import write_perfetto, write_png
from lightning_parallel.pipeline.engine import Engine, Microbatch
from lightning_parallel.pipeline.logs import LogRecorder
from lightning_parallel.pipeline.random import mix, seed_host_generators
from lightning_parallel.pipeline.timeline import Timeline, report
from lightning_parallel.pipeline.weights import Weights
from lightning_parallel.strategies.evaluation import StreamedEvaluation
from lightning_parallel.strategies.metrics import logging_through

Microbatches = int | Literal["auto"]


class PipelineBase(StreamedEvaluation):
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
        self._batches_seen = 0

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._timeline = Timeline(enabled=self._timeline.enabled)  # of this run alone; the engine takes it
        super().setup(trainer)
        self._batches_seen = 0

    @override
    def make_engine(self) -> Engine:
        return Engine(
            self.stage,
            self.layout,
            self.groups,
            self.root_device,
            loss_of=_loss_of,
            weights=self.make_weights(),
            completing=self.before_last_backward,
            timeline=self._timeline,
        )

    def make_weights(self) -> Weights | None:
        """Which weights the engine's forwards use; None: the module's own."""
        return None

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
            self.check_same_batch(batch)
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

    def _user_step(self, arguments: tuple[Any, ...], recorder: LogRecorder, size: int, seed: int) -> Any:
        recorder.weight = size
        seed_host_generators(seed)
        with self.precision_plugin.train_step_context(), self.sharded_region():
            return self._module().training_step(*arguments)

    @contextlib.contextmanager
    def recorded(self, recorder: LogRecorder) -> Iterator[None]:
        """``self.log`` inside microbatches: kept by the recorder on the last stage, dropped on the others. Each
        microbatch draws numbers of its own (:meth:`_user_step`, and the engine)."""
        log = logging_through(self._module(), recorder.log) if self.stage.is_last else contextlib.nullcontext()
        with log, self._apart("training_step"):
            yield

    def joined_output(self, outputs: list[Any], sizes: list[int]) -> Any:
        """What training_step would have returned for the whole batch, detached."""
        loss = batches.weighted_mean([_loss_of(output).detach().reshape(()) for output in outputs], sizes)
        joined = batches.join_outputs(outputs, sizes)
        return {**joined, "loss": loss} if isinstance(joined, Mapping) else loss

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
        write_png(rows, directory / "timeline.png", title=self.title(), theory=theory, labels=labels)
        write_perfetto(rows, directory / "timeline.json", labels=labels)
        rank_zero_info(f"{report(rows, theory)}\nWritten: {directory}/timeline.png and timeline.json")

    def title(self) -> str:
        """Names the schedule in pictures."""
        return f"{self.layout.pipeline} stages"


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
