"""Reports while a model trains: its speed, how much of the hardware it uses, and the memory of each rank.

Each rank counts by itself, on the host. At every ``log_every_n_steps`` it leaves its figures where rank 0 finds them,
and rank 0 logs them. No rank waits for another one, or for a GPU::

    rank 1    batch 9   memory 1.1 GiB  ->  noticeboard
    rank 0    batch 9   memory 1.2 GiB  ->  noticeboard  ->  loggers, progress bar
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_parallel.callbacks.graph_flops import ForwardFlops
from lightning_parallel.callbacks.performance import Noticeboard, StageFigures, content, memory_in_use, peak_of
from lightning_parallel.private.lightning.batches import ends_update
from lightning_parallel.private.lightning.metrics import logged_step, show_in_progress_bar
from lightning_parallel.timeline.recording import COMPUTE

_BACKWARDS = 2  # a backward computes as much as two forwards
_EACH = 64  # ranks; the memory of more isn't told one by one


class PerformanceMonitor(Callback):
    """Logs what a training achieves, at every ``log_every_n_steps``, and shows it in the progress bar.

    ======================  ===========================================================================================
    ``tokens_per_second``   or ``samples_per_second``: of all replicas, without validation. A batch has tokens if an
                            integer tensor [batch, time] is in it; padding counts.
    ``mfu``                 model FLOPs utilisation, between 0 and 1: the operations of forwards, and twice as many for
                            backwards, by torch's formulas, over the peak of all devices. What is computed again for
                            ``activation_checkpointing`` doesn't count. Batches of other sizes count by their tokens.
                            Left out where it would be above 1: the peak is then higher than what is known of it.
    ``memory_gib/rank3``    of each rank: resident in host memory; on a GPU the most that was allocated so far. Of more
                            than 64 ranks, ``memory_gib/highest`` alone.
    ``bubble_theory``       of a pipeline: the fraction of time that its schedule leaves stages idle.
    ``bubble_measured``     the fraction in which they ran no forward, backward or step; with ``timeline=True``.
    ``staleness``           of an asynchronous pipeline: by how many updates gradients were late so far, in the mean, on
                            the stage where they are latest.
    ======================  ===========================================================================================

    The first batch counts in none of them, since much is made in it. For ``mfu``, pipelines count in their dry run of
    the step before training. Other strategies read the operations off the graph of the first batch. Layers before the
    first trained one aren't in that graph, so they don't count. There is no ``mfu`` where the graph doesn't show
    everything: if a part of the model is compiled or is an ``autograd.Function`` of its own, and for replicas in one
    process. A module may give the number itself: ``flops_per_batch``, a number or a function, of a replica's batch with
    the backward, as for Lightning's ``ThroughputMonitor``.

    Args:
        peak_flops: the FLOP/s of one device in the run's precision; None: by the data sheet of a GPU that Lightning
            knows, otherwise measured with products of matrices.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and peak_flops <= 0:
            raise ValueError(f"peak_flops={peak_flops}: give the FLOP/s of one device, or leave it out.")
        self._given_peak = peak_flops
        self._peak = 0.0  # of one device
        self._noticeboard: Noticeboard | None = None
        self._flops: float | None = None  # of one token or sample, on all ranks of a replica, if it is known
        self._forward = ForwardFlops()  # of the first batch, on this rank
        self._unit, self._count = "samples", 0  # what batches hold, and how much since the last log
        self._since: float | None = None  # of the clock; None before the first batch has ended
        self._paused: float | None = None
        self._spans = 0  # of the timeline, read so far
        self._bubble: float | None = None

    # -- a run ---------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = self._paused = self._bubble = None
        self._count = self._spans = 0
        self._flops = None
        self._forward = ForwardFlops(_ranks_of_a_replica(trainer))
        self._peak = self._given_peak or peak_of(trainer)
        self._noticeboard = Noticeboard() if trainer.world_size > 1 else None
        if self._noticeboard is not None:
            self._noticeboard.leave({"memory": memory_in_use(trainer.strategy.root_device)})

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._since is None and trainer.is_global_zero:
            self._forward.add(loss)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._unit, count = content(batch)
        if self._since is None:
            self._flops = self._flops_of_one(trainer, pl_module, count)
            self._forward = ForwardFlops()  # it holds the graph
            self._begin_interval(trainer)
            return
        self._count += count
        step = logged_step(trainer)
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if interval and (step + 1) % interval == 0 and ends_update(trainer):
            self._tell(trainer, step)

    def _flops_of_one(self, trainer: pl.Trainer, module: nn.Module, count: int) -> float | None:
        """The operations for one token or sample, given their number in the first batch."""
        if count == 0:  # an image without objects
            return None
        given = getattr(module, "flops_per_batch", None)
        if given is not None:
            return float(given() if callable(given) else given) / count
        stage = _stage_figures(trainer)
        forward = (stage is not None and stage.forward_flops) or self._forward.total or 0
        return (1 + _BACKWARDS) * forward / count or None

    # -- figures -------------------------------------------------------------------------------------------------

    def _begin_interval(self, trainer: pl.Trainer) -> None:
        self._since, self._count = time.monotonic(), 0
        stage = _stage_figures(trainer)
        self._spans = stage.timeline.recorded if stage is not None else 0

    def _tell(self, trainer: pl.Trainer, step: int) -> None:
        assert self._since is not None
        seconds = time.monotonic() - self._since
        stage = _stage_figures(trainer)
        own: dict[str, float] = {"memory": memory_in_use(trainer.strategy.root_device)}
        if stage is not None and stage.timeline.enabled:
            spans = stage.timeline.newest(stage.timeline.recorded - self._spans)
            own["busy"] = sum(span.end - span.start for span in spans if span.kind in COMPUTE) / seconds
        if stage is not None and stage.staleness is not None:
            own["staleness"] = stage.staleness
        everyone = [own]
        if self._noticeboard is not None:
            self._noticeboard.leave(own)
            everyone = self._noticeboard.read() if trainer.is_global_zero else []
        if trainer.is_global_zero and everyone:
            figures = self._figures(trainer, seconds, stage, everyone)
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)
            show_in_progress_bar(trainer, _texts(figures, self._unit))
        self._begin_interval(trainer)

    def _figures(
        self, trainer: pl.Trainer, seconds: float, stage: StageFigures | None, everyone: list[dict[str, float]]
    ) -> dict[str, float]:
        rate = _replicas(trainer) * self._count / seconds
        figures = {f"{self._unit}_per_second": rate}
        mfu = rate * (self._flops or 0) / (self._peak * trainer.world_size)
        if 0 < mfu <= 1:  # more would only tell that the peak isn't one
            figures["mfu"] = mfu
        memory = [each["memory"] / 2**30 for each in everyone]
        if len(memory) <= _EACH:
            figures |= {f"memory_gib/rank{rank}": value for rank, value in enumerate(memory)}
        else:
            figures["memory_gib/highest"] = max(memory)
        if stage is not None:
            if self._bubble is None:
                self._bubble = stage.bubble()
            figures["bubble_theory"] = self._bubble
        busy = [each["busy"] for each in everyone if "busy" in each]
        if busy:
            figures["bubble_measured"] = 1 - sum(busy) / len(busy)
        late = [each["staleness"] for each in everyone if "staleness" in each]
        if late:
            figures["staleness"] = max(late)
        return figures

    # -- what isn't training -------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = time.monotonic()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._since is not None and self._paused is not None:
            self._since += time.monotonic() - self._paused
        self._paused = None


def _stage_figures(trainer: pl.Trainer) -> StageFigures | None:
    ask = getattr(trainer.strategy, "stage_figures", None)
    return ask() if ask is not None else None


def _replicas(trainer: pl.Trainer) -> int:
    """The number of replicas that get different batches."""
    return (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)


def _ranks_of_a_replica(trainer: pl.Trainer) -> int:
    return int(trainer.world_size) // int(_replicas(trainer))


def _texts(figures: dict[str, float], unit: str) -> dict[str, str]:
    """The texts for the progress bar."""
    texts = {f"{unit}/s": f"{figures[f'{unit}_per_second']:,.0f}"}
    texts |= {"mfu": f"{figures['mfu']:.1%}"} if "mfu" in figures else {}
    highest = max(value for name, value in figures.items() if name.startswith("memory_gib/"))
    texts["memory"] = f"{highest:.2f} GiB"
    bubble = next((name for name in ("bubble_measured", "bubble_theory") if name in figures), None)
    texts |= {bubble: f"{figures[bubble]:.1%}"} if bubble is not None else {}
    return texts | ({"late": f"{figures['staleness']:.2f}"} if "staleness" in figures else {})
