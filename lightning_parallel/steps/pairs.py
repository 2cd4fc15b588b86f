"""Tries neighbouring microbatches as one (:mod:`lightning_parallel.losses.trial`), in evaluation mode.

**The loss.** On the last stage each microbatch of the first batch is tried with the one before it: the step runs on
one, then on the other, which finds what the first has left on modules, and on both. Later batches may differ from the
first one, so a pair is tried in the second, third, fifth, ninth, ... batch as well, other microbatches each time. So is
a loss of a make that hasn't been tried::

    batch 0    0-1  1-2  2-3        batch 1    1-2        batch 2    2-3        batch 4    0-1

**The layers before it.** A layer that computes with several samples sees those of one microbatch, so its output differs
from that of one process: a normalisation by the batch's own mean, attention over samples, a batch whose samples don't
lie along dimension 0. So each chunk but the last tries the first two microbatches of the run::

    both     4 samples     what the chunk sends on
    each     2 samples     what it sends on, joined        -> if it isn't the same, samples are mixed
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.batch import split_into
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.losses.counts import count_of, numbered
from lightning_parallel.losses.graph import Number, Term, terms_of
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.losses.trial import Findings, Outcome, find, joined, joins, kinds_of, outcome, tolerance_of
from lightning_parallel.pipeline.chunk import Again, Trial
from lightning_parallel.ranks.run import Run
from lightning_parallel.ranks.writes import WritesRefused
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.results.logs import trial
from lightning_parallel.steps.kept_state import differing, left_by
from lightning_parallel.tracing.snapshot import StateKept
from lightning_parallel.values import first_few, scalars

_TRIALS = 8  # at most in the first batch, and at most of losses of a new make: a step may make ever new ones

# Of a step that wasn't made for other numbers of samples.
_FAILURES = (ValueError, RuntimeError, IndexError, TypeError, AttributeError, KeyError, AssertionError)

Step = Callable[[Any], Any]  # runs the step on a batch


@dataclass
class _Tried:
    """A microbatch, to be tried with the one after it.

    Attributes:
        step: runs the user's step on a part of the batch.
        arrived: its activations; empty until its forward has run, as what follows is unknown.
        make: the operations that its loss is made of.
        terms: the keys of its loss's terms.
        count: what its loss averages over.
    """

    step: Step
    batch: Any
    sizes: Sequence[int]
    index: int
    arrived: Sequence[Tensor] = ()
    make: frozenset[str] = frozenset()
    terms: Collection[str] = ()
    count: Number = 0.0

    @property
    def share(self) -> float | None:
        """What a sample's loss averages over, if the host has the number."""
        return self.count / self.sizes[self.index] if isinstance(self.count, float) else None

    def as_run(self, outcome: Outcome) -> Outcome:
        """What the step alone has come to, with the count of its run in the schedule. There torch.compile may hide by
        what the loss is divided; a trial runs nothing compiled."""
        return outcome if outcome.terms.keys() == self.terms else replace(outcome, count=float(self.count))


@dataclass(frozen=True)
class _Part:
    """A microbatch, or two as one: a batch, the activations that arrived for it, and the number of samples."""

    batch: Any
    arrived: Sequence[Tensor]
    size: int


class PairTrials:
    """The trials of a run.

    Args:
        last_stage: keeps the ranks and the random numbers of a trial's steps apart from the run's.
        take: is called with what a trial of the loss has found. It returns whether several rules are still possible.

    Attributes:
        batches: whose losses have been tried, as far as they were to be.
        has_tried: has a trial of the loss shown anything?
    """

    def __init__(
        self, run: Run, last_stage: LastStage, partition: Partition, take: Callable[[Findings, BatchLoss], bool]
    ) -> None:
        self._run, self._last_stage, self._partition, self._take = run, last_stage, partition, take
        self.batches = 0
        self._makes: set[frozenset[str]] = set()  # of losses that have been tried
        self._shares: set[float | None] = set()
        self._is_open = True  # are several rules possible?
        self._wants_next = False  # is the next microbatch's loss to be tried, though it isn't its turn?
        self._before: dict[int, _Tried] = {}  # by chunk
        self._left = _TRIALS  # of losses of a new make

    @property
    def has_tried(self) -> bool:
        return bool(self._makes)

    def trial(
        self, step: Step, batch: Any, sizes: Sequence[int], index: int, batch_loss: BatchLoss | None, *, layers: bool
    ) -> Trial | None:
        """The trial that follows a microbatch's forward; None if nothing is to be tried.

        Args:
            step: runs the user's step on a part of the batch.
            batch: as the loader gave it.
            sizes: the number of samples in each microbatch.
            index: the microbatch's number in the batch.
            batch_loss: None if the loss isn't to be tried.
            layers: try the layers before it.
        """
        due = self._is_due(index, len(sizes))
        tried = batch_loss if due or self._left else None
        if tried is None and not layers:
            return None
        this = _Tried(step, batch, sizes, index)

        def wants_activations(is_last: bool) -> bool:
            return tried is not None and (due or self._wants_next) if is_last else layers

        def run(again: Again, loss: Tensor | None, terms: list[Term]) -> None:
            if loss is None and layers:
                self._try_layers(this, again)
            elif loss is not None and tried is not None:
                self._try_loss(this, tried, due, loss, terms, again)

        return Trial(wants_activations, run)

    def end_batch(self) -> None:
        """All microbatches of a batch have run."""
        self.batches += 1
        self._before = {}

    def _is_due(self, index: int, count: int) -> bool:
        if self.batches == 0:
            return index <= _TRIALS
        first = self.batches.bit_length() % (count - 1)
        return self.batches.bit_count() == 1 and index in (first, first + 1)

    # -- runs ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _parts(one: _Tried, other: _Tried, of_samples: bool = False) -> tuple[_Part, _Part, _Part] | None:
        """Two neighbours, and both as one; None if what arrived for them doesn't tell where its samples lie.
        ``of_samples``: as for :func:`.joined`."""
        first, pair = one.index, (one.sizes[one.index], one.sizes[other.index])
        arrived_pairs = zip(one.arrived, other.arrived, strict=True)
        both = [joined(*tensors, pair, of_samples=of_samples) for tensors in arrived_pairs]
        arrived = [tensor for tensor in both if tensor is not None]
        if len(arrived) < len(both):
            return None
        each = split_into(one.batch, one.sizes)
        whole = split_into(one.batch, [*one.sizes[:first], sum(pair), *one.sizes[first + 2 :]])[first]
        return (
            _Part(each[first], one.arrived, pair[0]),
            _Part(each[first + 1], other.arrived, pair[1]),
            _Part(whole, arrived, sum(pair)),
        )

    def _run_step(self, step: Step, part: _Part, again: Again, seed: int) -> Any:
        writes = WritesRefused(self._run.module.parameters())  # RWKV's layers scale theirs to evaluate
        with self._last_stage.alone("training_step", seed), writes:
            return again.run(lambda: step(part.batch), part.arrived)

    @contextmanager
    def _without_effect(self) -> Iterator[list[dict[str, Any]]]:
        """Inside, a training step doesn't count, and layers draw nothing. It gives the calls of ``self.log``."""
        run = self._run
        others = [part for part in run.module.modules() if part is not run.module and part.training]
        with ExitStack() as kept:
            kept.enter_context(StateKept(run.module))
            logged = kept.enter_context(trial(run.trainer, run.module))
            for part in others:
                part.training = False
            try:
                yield logged
            finally:
                for part in others:
                    part.training = True

    # -- the loss --------------------------------------------------------------------------------------------------

    def _try_loss(
        self, this: _Tried, batch_loss: BatchLoss, due: bool, loss: Tensor, terms: list[Term], again: Again
    ) -> None:
        terms = terms or terms_of(loss)
        this.count = count_of(terms, loss, float(this.sizes[this.index]))
        this.make, this.terms = kinds_of(terms, this.count), numbered(terms).keys()
        before = self._before.pop(again.chunk, None)
        is_new = this.make not in self._makes or (self._is_open and this.share not in self._shares)
        if again.arrived is None:
            self._wants_next |= is_new
            return
        this.arrived, self._before[again.chunk] = again.arrived, this
        if before is None or before.batch is not this.batch or before.index != this.index - 1:
            return
        self._left = max(0, self._left - (not due))  # all trials of a batch have been planned when its first one runs
        found = self._found(before, this, again, loss.dtype)
        if found is None and any(map(torch.equal, before.arrived, this.arrived)):
            found = self._found(before, this, again, loss.dtype, of_samples=True)
        if found is None:
            return
        self._makes |= {before.make, this.make}
        self._shares |= {before.share, this.share}
        self._wants_next = False
        self._is_open = self._take(found, batch_loss)

    def _found(
        self, one: _Tried, other: _Tried, again: Again, dtype: torch.dtype, *, of_samples: bool = False
    ) -> Findings | None:
        """What follows from two neighbours; None if nothing does. ``of_samples``: as for :func:`.joined`."""
        tolerance = tolerance_of(dtype)
        looks = self.batches > 0 or one.index == 0  # at what is left; to read it takes a while

        def run(*parts: _Part, seed: int = 0, traced: bool = False) -> tuple[list[Outcome], dict[str, Tensor]]:
            """Run the step on one part after the other: what each run comes to, and what all leave for later."""
            outcomes: list[Outcome] = []
            left: dict[str, Tensor] = {}

            def steps() -> None:
                for part in parts:
                    logged.clear()
                    loss = self._run_step(other.step, part, again, seed)
                    outcomes.append(outcome(loss, part.size, _means(logged)))

            with self._without_effect() as logged, torch.autograd.set_detect_anomaly(traced, check_nan=False):
                if looks:
                    left = left_by(self._run.module, steps)
                else:
                    steps()
            return outcomes, left

        try:
            parts = self._parts(one, other, of_samples)
            if parts is None:
                return None
            *each, both = parts
            outcomes, left_by_each = run(*each)
            outcomes = [tried.as_run(found) for tried, found in zip((one, other), outcomes, strict=True)]
            (whole,), left_by_both = run(both, traced=not self.has_tried)  # a later warning may need the lines
            if not math.isfinite(whole.loss) or not (whole.loss or any(part.loss for part in outcomes)):
                return None  # any rule would hold
            found = find(whole, outcomes, [part.size for part in each], tolerance)
            draws = not (found.rules and all(found.logs.values()))
            again_whole = run(both, seed=1, traced=True)[0][0] if draws else whole
        except _FAILURES:
            return None
        if not found.rules and again_whole.loss != whole.loss:
            return None  # by random numbers
        logs = {name: rule for name, rule in found.logs.items() if again_whole.logged.get(name) == whole.logged[name]}
        left = differing(left_by_both, left_by_each, tolerance)
        return replace(found, logs=logs, lines=again_whole.lines or whole.lines, left=left)

    # -- the layers before it --------------------------------------------------------------------------------------

    def _try_layers(self, this: _Tried, again: Again) -> None:
        assert again.arrived is not None, "kept for it"
        this.arrived = again.arrived
        before = self._before.pop(again.chunk, None)
        if before is None:
            self._before[again.chunk] = this
            return

        def sent(part: _Part, seed: int = 0) -> list[Tensor]:
            with self._without_effect(), torch.no_grad():
                output: list[Tensor] = self._run_step(this.step, part, again, seed)
                return output

        try:
            parts = self._parts(before, this)
            if parts is None:
                return
            one, other, both = parts
            pair = (one.size, other.size)
            each = sent(one), sent(other)
            # Both in any case: tensor ranks run them together, and may see differences in some of their pieces only.
            as_one, as_one_again = sent(both), sent(both, seed=1)
            mixed = not all(joins(*tensors, pair) for tensors in zip(as_one, *each, strict=True))
            if not mixed or not all(map(torch.equal, as_one, as_one_again)):
                return  # nothing is mixed, or the chunk draws random numbers in evaluation mode, too
        except _FAILURES:
            return  # the step can't run on other numbers of samples, or makes another number of tensors of them
        layout = self._run.layout
        if layout.index("data") or layout.index("tensor"):
            return  # the first replica and tensor rank warns
        units = [repr(name) for name, chunks in self._partition.units.items() if again.chunk in chunks]
        warnings.warn(
            f"training_step computes with several samples of a batch together, in or before {first_few(units)}: "
            f"a statistic of the batch, attention over samples, or a batch whose samples don't lie along dimension 0. "
            f"There it sees one of {len(this.sizes)} microbatches, so the loss differs from that of one process. Use "
            f"microbatches=1.",
            stacklevel=2,
        )


def _means(logged: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a step has logged as the mean of numbers, by name."""
    plain = [call for call in logged if call["reduce_fx"] == "mean" and call["batch_size"] is None]
    return scalars({call["name"]: call["value"] for call in plain})
