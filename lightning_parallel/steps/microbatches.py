"""Turns a batch into the work of its microbatches, and their outputs into the output of the whole batch.

::

    batch of 10 samples, microbatches=4    sizes 3, 3, 2, 2    weights of the losses 0.3, 0.3, 0.2, 0.2

``loss_means.py`` has what is weighted otherwise: losses that average over labels, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_parallel.batch import rebuilt
from lightning_parallel.batch_joins import join_outputs
from lightning_parallel.gradients.loss_scale import scaler_of
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.pipeline.chunk import Microbatch
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.ranks.collectives import together
from lightning_parallel.ranks.run import Run
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.results.log_joins import LogJoins
from lightning_parallel.results.logs import LogRecorder, discard, logging_through
from lightning_parallel.seeding import Generators, mix
from lightning_parallel.set_up.dry_runs import DryRuns
from lightning_parallel.set_up.splitting import Splitting
from lightning_parallel.set_up.tensor_shards import TensorShards
from lightning_parallel.steps.changes import StepChanges
from lightning_parallel.steps.effects import StepEffects
from lightning_parallel.steps.loss_means import LossMeans
from lightning_parallel.tracing.snapshot import StateKept

_RETURNED = "outputs['{}']"  # the name under which a number that the step returns is recorded


class Microbatches:
    """Splits batches into microbatches, and joins what these return.

    Args:
        weight: the setting ``microbatch_weight``.
        shards: keeps the random numbers of tensor ranks apart inside their layers, and the same after a step.

    Attributes:
        count: the number of microbatches of the batch that runs, or ran last.
        loss: of that batch.
    """

    def __init__(
        self,
        run: Run,
        splitting: Splitting,
        weight: Callable[[Any], float] | None,
        shards: TensorShards,
        dry_runs: DryRuns,
        last_stage: LastStage,
        stage: Stage,
    ) -> None:
        self._run, self._splitting, self._shards, self._stage = run, splitting, shards, stage
        self._scaler = scaler_of(run.precision)
        inside = {id(part) for name in stage.partition.units for part in run.module.get_submodule(name).modules()}
        parts = run.module.modules()
        self._metrics = [part for part in parts if isinstance(part, Metric) and id(part) not in inside]
        self._training_step = self.wrapped("training_step", self._noted_step)
        self._dry_runs, self._last_stage, self._replica = dry_runs, last_stage, run.layout.index("data")
        self._generators = Generators(run.device)
        self._known = lambda: dry_runs.known.get("training_step", ())
        self._means = LossMeans(run, weight, last_stage, stage.partition, self._known, by_user=splitting.by_user)
        self._recorder = LogRecorder(LogJoins(run.warn))
        # What the batch that is running would log in one run of the step.
        self._logs_of_whole: Callable[[], Mapping[str, Any]] = dict
        self._effects = StepEffects(run)
        shared = [name for name, on in stage.partition.buffers.items() if len(on) > 1]
        self.changes = StepChanges(run.module, shared)
        self.count, self.loss = 1, BatchLoss([1])
        self._is_watched = False  # does this stage run steps to their end, and more or other ones than one process?
        self._is_first_batch = True

    def wrapped(self, kind: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step of a kind (its name), wrapped in what several chunks, or several tensor ranks, need."""
        if len(self._stage.chunks) > 1:
            step = partial(self._of_chunk, step)
        return step if self._run.layout.size("tensor") == 1 else partial(self._shards.run, kind, step)

    def _of_chunk(self, step: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """A step for one of several chunks of this stage. Each run gets its own containers, since the step may empty
        them. On the last stage only the run for the last chunk reaches the end of the step. Those for earlier chunks
        pass its beginning, too: what they log and count there is dropped."""
        arguments, more = rebuilt((arguments, more))
        if not self._stage.has_last_chunk or self._stage.runs_last_chunk:
            return step(*arguments, **more)
        with logging_through(self._run.module, discard), ExitStack() as kept:
            for metric in self._metrics:
                kept.enter_context(StateKept(metric))
            return step(*arguments, **more)

    def begin_batch(self, arguments: tuple[Any, ...], *, first: int = 0) -> dict[int, Microbatch]:
        """Begin a batch: split it, and return its work by microbatch number. A kind's first batch gets a dry run.

        Args:
            arguments: those of ``training_step``, the batch first.
            first: the number of its first microbatch.

        Raises:
            ValueError: the batch can't be split like this.
        """
        batch, *rest = arguments
        parts, counts = self._splitting.parts(batch)
        self.count = len(parts)
        self._is_watched = self._run.layout.is_last_stage and not self._run.layout.stages == self.count == 1
        # Numbered through the whole run, so a resumed run draws the same random numbers.
        batch_number = self._run.trainer.fit_loop.total_batch_idx
        seeds = [mix(self._run.seed, self._replica, batch_number, k) for k in range(self.count)]
        is_first, self._is_first_batch = self._is_first_batch, False
        self.loss = loss = self._means.of(parts, counts, is_first=is_first)

        on_copy = partial(self._run_on_copy, rest)
        # A dry run of the first batch tells what steps will do.
        flow = self._dry_runs.set_flow("training_step", partial(on_copy, seeds[0], parts[0]), self.count)
        if is_first:
            together(None, self._effects.check)
        self.changes.begin_batch(() if flow is None else flow.updated, self.count, len(self._stage.chunks))
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())  # once: the host waits for a GPU here
        # A trial would change once more what steps are known to change. After the first batch only losses are tried.
        tries = not self.changes.known and (is_first or self._run.layout.is_last_stage)
        work: dict[int, Microbatch] = {}
        for k, (part, seed) in enumerate(zip(parts, seeds, strict=True)):
            again = partial(on_copy, None)  # a trial seeds its runs
            work[first + k] = Microbatch(
                step=partial(self._step, (part, *rest), counts[k], k),
                scale=scale,
                loss=loss,
                index=k,
                seed=seed,
                ends_batch=k == len(parts) - 1,
                trial=self._means.trial(again, batch, counts, k, loss, is_first=is_first) if tries else None,
            )
        of_whole = partial(on_copy, mix(self._run.seed, batch_number), batch)
        self._logs_of_whole = partial(self._dry_runs.logged, "training_step", of_whole)
        return work

    def _run_on_copy(self, rest: Sequence[Any], seed: int | None, part: Any) -> Any:
        """The user's step on a copy of a batch or a microbatch, for a dry run or a trial."""
        if seed is not None:
            self._generators.seed(seed)
        with self._run.precision.forward_context():
            step = partial(self._dry_runs.on_copy, self._noted_step, part, *rest)
            return self._effects.try_out(step) if self._is_watched else step()

    def _step(self, arguments: tuple[Any, ...], size: int, index: int) -> Any:
        """The user's step on the microbatch of this index."""
        step = partial(self._training_step, *arguments)
        if self._run.layout.is_last_stage:
            self._recorder.begin(size)
        with self._run.precision.forward_context():
            return self.changes.run(partial(self._effects.run, step) if self._is_watched else step, index)

    def _noted_step(self, *arguments: Any) -> Any:
        """The user's step. Numbers that it returns beside the loss are recorded as if they were logged, so they are
        joined as those are."""
        output = self._run.module.training_step(*arguments)
        for name, value in output.items() if isinstance(output, Mapping) else ():
            is_number = value.dim() == 0 if isinstance(value, Tensor) else type(value) in (int, float)
            if is_number and name != "loss":
                self._run.module.log(_RETURNED.format(name), value)
        return output

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the engine's run: what steps log on the last stage is recorded. It is dropped on the others. Steps see
        the ranks of the data axis."""
        log: AbstractContextManager[None] = nullcontext()
        if self._is_watched:
            log = self._effects.watching(self._recorder.log)
        elif self._run.layout.is_last_stage:
            log = logging_through(self._run.module, self._recorder.log)
        with log, self._run.collectives.inside_step("training_step"):
            yield

    def joined(self, outputs: list[Any]) -> Any:
        """What Lightning gets from the step on the batch. On the last stage, log the batch, and return what the step
        would have returned, detached. On the others, return the loss alone, a :class:`.LateLoss`."""
        if not self._run.layout.is_last_stage:
            return self._last_stage.outcomes.coming()
        loss = self.loss
        self._effects.end_batch()
        self._means.check(loss)
        output = join_outputs(outputs, loss.sizes)
        joined = {**output} if isinstance(output, Mapping) else {}
        returned = {_RETURNED.format(name): name for name in joined}

        def log(name: str, value: Any, **options: Any) -> None:
            if name in returned:
                joined[returned[name]] = value
            else:
                self._run.module.log(name, value, **options)

        guessed = not self._splitting.counts_samples
        whole, known = self._logs_of_whole, self._known()
        self._recorder.replay(log, loss, self._means.logs, as_loss=guessed, whole=whole, known=known)
        value = loss.loss()
        self._last_stage.outcomes.send(value)
        return {**joined, "loss": value} if isinstance(output, Mapping) else value


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned. A number stands for that of a microbatch in which nothing counts, as
    ``sum([])`` gives it.

    Raises:
        RuntimeError: there is none, or it is no scalar.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, int | float):
        loss = torch.tensor(float(loss))
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            f"training_step returned {'no loss' if loss is None else type(loss).__name__}: a pipeline can't skip a "
            f"batch, since every stage has to take part. Return a tensor, or a dict with a tensor under 'loss'."
        )
    if loss.numel() != 1:
        raise RuntimeError(f"training_step returned a loss of shape {tuple(loss.shape)}: return a scalar.")
    return loss
