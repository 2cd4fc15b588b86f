"""Tries neighbouring microbatches as one (:mod:`lightning_parallel.losses.trial`).

In the first batch each microbatch is tried with the one before it. Later batches may differ from the first one, so a
pair is tried in the second, third, fifth, ninth, ... batch as well, other microbatches each time. So is a loss of a
make that hasn't been tried::

    batch 0    0-1  1-2  2-3        batch 1    1-2        batch 2    2-3        batch 4    0-1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.batch import split_into
from lightning_parallel.checks.first_losses import scalars
from lightning_parallel.losses.graph import Number, Term, terms_of
from lightning_parallel.losses.normaliser import BatchLoss, count_of, numbered
from lightning_parallel.losses.trial import Findings, Outcome, find, joined, kinds_of, outcome
from lightning_parallel.pipeline.chunk import Again, Trial
from lightning_parallel.ranks.run import Run
from lightning_parallel.ranks.writes import WritesRefused
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.results.logs import trial
from lightning_parallel.steps.kept_state import differing, left_by
from lightning_parallel.tracing.snapshot import StateKept

_TRIALS = 8  # at most in the first batch, and at most of losses of a new make: a step may make ever new ones
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}

# Of a step that wasn't made for other numbers of samples.
FAILURES = (ValueError, RuntimeError, IndexError, TypeError, AttributeError, KeyError, AssertionError)

Step = Callable[[Any], Callable[[], Tensor]]  # makes the step of a batch, which returns the loss


@dataclass
class _Tried:
    """A microbatch, to be tried with the one after it.

    Attributes:
        step: makes the user's step of a part of the batch.
        arrived: its activations; empty until its forward has run, as what follows is unknown.
        make: the operations that its loss is made of.
        terms: the keys of its loss's terms.
        count: what its loss averages over.
        outcome: what its step alone has come to.
    """

    step: Step
    batch: Any
    sizes: Sequence[int]
    index: int
    arrived: Sequence[Tensor] = ()
    make: frozenset[str] = frozenset()
    terms: Collection[str] = ()
    count: Number = 0.0
    outcome: Outcome | None = None

    @property
    def share(self) -> float | None:
        """What a sample's loss averages over, if the host has the number."""
        return self.count / self.sizes[self.index] if isinstance(self.count, float) else None

    def as_run(self, outcome: Outcome) -> Outcome:
        """What the step alone has come to, with the count of its run in the schedule. There torch.compile may hide by
        what the loss is divided; a trial runs nothing compiled."""
        return outcome if outcome.terms.keys() == self.terms else replace(outcome, count=float(self.count))


class LossPairs:
    """The trials of a run, on the last stage.

    Args:
        last_stage: keeps the ranks and the random numbers of a trial's steps apart from the run's.
        take: is called with what a trial has found. It returns whether several rules are still possible.

    Attributes:
        has_tried: has a trial shown anything?
    """

    def __init__(self, run: Run, last_stage: LastStage, take: Callable[[Findings, BatchLoss], bool]) -> None:
        self._run, self._last_stage, self._take = run, last_stage, take
        self.batches = 0
        self._makes: set[frozenset[str]] = set()  # of losses that have been tried
        self._shares: set[float | None] = set()
        self._is_open = True  # are several rules possible?
        self._wants_next = False  # is the next microbatch to be tried, though it isn't its turn?
        self._before: _Tried | None = None
        self._left = _TRIALS  # of losses of a new make

    @property
    def has_tried(self) -> bool:
        return bool(self._makes)

    def trial(self, step: Step, batch: Any, sizes: Sequence[int], index: int, batch_loss: BatchLoss) -> Trial | None:
        """The trial that follows a microbatch's forward; None if nothing is to be tried.

        Args:
            step: makes the user's step of a part of the batch.
        """
        due = self._is_due(index, len(sizes))
        if not due and not self._left:
            return None
        this = _Tried(step, batch, sizes, index)
        return Trial(lambda: due or self._wants_next, partial(self._try, this, batch_loss, due))

    def end_batch(self) -> None:
        """All microbatches of a batch have run."""
        self.batches += 1
        self._before = None

    def _is_due(self, index: int, count: int) -> bool:
        if self.batches == 0:
            return index <= _TRIALS
        first = self.batches.bit_length() % (count - 1)
        return self.batches.bit_count() == 1 and index in (first, first + 1)

    def _try(
        self, this: _Tried, batch_loss: BatchLoss, due: bool, loss: Tensor, terms: list[Term], again: Again
    ) -> None:
        terms = terms or terms_of(loss)
        this.count = count_of(terms, loss, float(this.sizes[this.index]))
        this.make, this.terms = kinds_of(terms, this.count), numbered(terms).keys()
        before, self._before = self._before, None
        is_new = this.make not in self._makes or (self._is_open and this.share not in self._shares)
        if again.arrived is None:
            self._wants_next |= is_new
            return
        this.arrived, self._before = again.arrived, this
        if before is None or before.batch is not this.batch or before.index != this.index - 1:
            return
        self._left -= not due
        found = self._found(before, this, again)
        if found is None:
            return
        self._makes |= {before.make, this.make}
        self._shares |= {before.share, this.share}
        self._wants_next = False
        self._is_open = self._take(found, batch_loss)

    def _found(self, one: _Tried, other: _Tried, again: Again) -> Findings | None:
        """What follows from two neighbours; None if nothing does."""
        first, pair = one.index, (one.sizes[one.index], one.sizes[other.index])
        lengths = [*one.sizes[:first], sum(pair), *one.sizes[first + 2 :]]

        def loss_of(step: Callable[[], Tensor], tensors: Sequence[Tensor]) -> Tensor:
            with WritesRefused(self._run.module.parameters()):  # RWKV's layers scale theirs to evaluate
                return again.run(step, tensors)

        def run(
            lengths: Sequence[int], tensors: Sequence[Tensor], index: int = first, seed: int = 0, traced: bool = False
        ) -> Outcome:
            part = split_into(one.batch, lengths)[index]
            with without_effect(self._run, self._last_stage, seed) as logged:
                step = other.step(part)
                return outcome(lambda: (loss_of(step, tensors), _means(logged)), lengths[index], traced=traced)

        def left(*runs: tuple[Sequence[int], Sequence[Tensor], int]) -> dict[str, Tensor]:
            with without_effect(self._run, self._last_stage, seed=0):
                steps = [(one.step(split_into(one.batch, lengths)[index]), tensors) for lengths, tensors, index in runs]
                return left_by(self._run.module, lambda: [loss_of(*each) for each in steps])

        try:
            arrived = [joined(*tensors, pair) for tensors in zip(one.arrived, other.arrived, strict=True)]
            both = [tensor for tensor in arrived if tensor is not None]
            if len(both) < len(arrived):
                return None
            one.outcome = one.outcome or one.as_run(run(one.sizes, one.arrived))
            other.outcome = other.as_run(run(one.sizes, other.arrived, first + 1))
            whole = run(lengths, both, traced=not self.has_tried)  # a later warning may need the lines
            parts = [one.outcome, other.outcome]
            if not math.isfinite(whole.loss) or not (whole.loss or any(part.loss for part in parts)):
                return None  # any rule would hold
            tolerance = TOLERANCES.get(again.dtype, 0.02)
            found = find(whole, parts, pair, tolerance)
            draws = not (found.rules and all(found.logs.values()))
            again_whole = run(lengths, both, seed=1, traced=True) if draws else whole
            if self.batches or first == 0:  # it takes as many runs as the loss
                parted = left((one.sizes, one.arrived, first), (one.sizes, other.arrived, first + 1))
                found = replace(found, left=differing(left((lengths, both, first)), parted, tolerance))
        except FAILURES:
            return None
        if not found.rules and again_whole.loss != whole.loss:
            return None  # by random numbers
        logs = {name: rule for name, rule in found.logs.items() if again_whole.logged.get(name) == whole.logged[name]}
        return replace(found, logs=logs, lines=again_whole.lines or whole.lines)


@contextmanager
def without_effect(run: Run, last_stage: LastStage, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Inside, a training step doesn't count, and layers draw nothing. It gives the calls of ``self.log``."""
    others = [part for part in run.module.modules() if part is not run.module and part.training]
    with ExitStack() as kept:
        kept.enter_context(StateKept(run.module))
        logged = kept.enter_context(trial(run.trainer, run.module))
        kept.enter_context(last_stage.alone("training_step", seed))
        for part in others:
            part.training = False
        try:
            yield logged
        finally:
            for part in others:
                part.training = True


def _means(logged: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a step has logged as the mean of numbers, by name."""
    plain = [call for call in logged if call["reduce_fx"] == "mean" and call["batch_size"] is None]
    return scalars({call["name"]: call["value"] for call in plain})
