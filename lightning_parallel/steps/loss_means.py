"""Weights the losses of microbatches: by what each averages over, or by ``microbatch_weight``.

The rule is tried on the last stage, where losses are (``pairs.py``). What can't be right is warned of once, by the
lines that divide the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import Tensor

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.losses.normaliser import BatchLoss, Rule
from lightning_parallel.losses.trial import Findings
from lightning_parallel.pipeline.chunk import Trial
from lightning_parallel.ranks.run import Run
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.steps.pairs import PairTrials, Step
from lightning_parallel.values import first_few

_UNTRIED = 3  # batches without a trial that has shown anything are warned of
_SEVERAL_TERMS = "has several terms, which average over numbers whose ratio differs between microbatches"
_INFINITE = "is a sum that isn't 0, divided by 0, where nothing counts in a microbatch, whose sum is left out"


class LossMeans:
    """The losses of batches.

    Args:
        wanted: the setting ``microbatch_weight``.
        last_stage: keeps the ranks and the random numbers of a trial's steps apart from the run's.
        known: gives the names whose value for the whole batch is known without the layers.
        by_user: the user's function splits batches. It can't put two microbatches together.

    Attributes:
        logs: rules for what steps log, by name, as far as they are known.
    """

    def __init__(
        self,
        run: Run,
        wanted: Callable[[Any], float] | None,
        last_stage: LastStage,
        partition: Partition,
        known: Callable[[], Container[str]],
        *,
        by_user: bool,
    ) -> None:
        self._run, self._wanted, self._known, self._by_user = run, wanted, known, by_user
        self._pairs = PairTrials(run, last_stage, partition, self._take)
        self._warned: set[str] = set()
        self._rule = Rule.COUNTS
        self._rules = frozenset(Rule)  # of which it is one
        self._rules_of_logs: dict[str, frozenset[Rule]] = {}
        self._problems: dict[str, bool | Tensor] = {}  # by words for them: did the last batch's loss have them?
        self._fixed: frozenset[str] = frozenset()
        self._lines: Sequence[str] = ()
        self.logs: dict[str, Rule | None] = {}

    def of(self, parts: Sequence[Any], sizes: Sequence[int], *, is_first: bool) -> BatchLoss:
        """The loss of a batch.

        Args:
            parts: the batch's microbatches.
            is_first: it is the run's first batch.

        Raises:
            ValueError: ``microbatch_weight`` returned something else than a number of at least 0.
        """
        batches = self._run.trainer.accumulate_grad_batches
        if len(parts) == 1:
            return BatchLoss(sizes, batches=batches)
        if self._wanted is None:
            return BatchLoss(sizes, self._rule, batches=batches)
        # In the first batch on all stages, so that an error is raised on all.
        asked = is_first or self._run.layout.is_last_stage
        given = self._by_function(self._wanted, parts) if asked else None
        return BatchLoss(sizes, given=given, batches=batches)

    def trial(
        self, step: Step, batch: Any, sizes: Sequence[int], index: int, batch_loss: BatchLoss, *, is_first: bool
    ) -> Trial | None:
        """What a microbatch is tried with (:meth:`.PairTrials.trial`). ``is_first``: it is of the run's first batch."""
        if len(sizes) == 1 or self._by_user:
            return None
        tries = self._wanted is None and "loss" not in self._warned and self._run.layout.is_last_stage
        layers = is_first and index < 2
        return self._pairs.trial(step, batch, sizes, index, batch_loss if tries else None, layers=layers)

    def check(self, loss: BatchLoss) -> None:
        """All microbatches of a batch have run: warn if no weights suit its loss. A GPU's answer is read in the next
        batch, when it has come."""
        earlier, self._problems = self._problems, {}
        if "loss" not in self._warned:
            self._problems = {_SEVERAL_TERMS: loss.differs(self._fixed), _INFINITE: loss.drops()}
        here = {problem: found for problem, found in self._problems.items() if isinstance(found, bool)}
        for problem in [each for each, found in (*earlier.items(), *here.items()) if found]:
            self._warn_of_loss(problem)
        if len(loss.sizes) == 1 or self._wanted is not None:
            return
        self._pairs.end_batch()
        if self._pairs.batches == _UNTRIED and not self._pairs.has_tried:
            two = "split= makes them" if self._by_user else "training_step fails on two as one, or draws random numbers"
            self._warn(
                "untried",
                f"It could not be tried whether the loss of a batch follows from those of its microbatches: {two}. "
                "The losses are combined by what each averages over. "
                "This is right for means over samples, labels or masks. "
                "If samples are compared with each other, use microbatches=1.",
            )

    def _take(self, found: Findings, batch_loss: BatchLoss) -> bool:
        self._fixed |= found.fixed
        self._lines = found.lines or self._lines
        self._rules &= found.rules
        if self._rules:
            self._rule = next(rule for rule in Rule if rule in self._rules)
        else:
            self._rules = frozenset(Rule)
            self._warn_of_loss(
                "is neither a mean over samples, nor over a number that adds up over microbatches, nor a sum: samples "
                "may be compared with each other, several terms may average over different numbers, the mean may be "
                "rooted or smoothed, or torch.compile may hide by what it is divided"
            )
        for name, rules in found.logs.items():
            rules = self._rules_of_logs[name] = self._rules_of_logs.get(name, frozenset(Rule)) & rules
            self.logs[name] = next((rule for rule in (Rule.SAMPLES, *Rule) if rule in rules), None)
        self.logs |= dict.fromkeys(sorted(found.losses & found.logs.keys()), self._rule)
        wrong = [name for name, rule in self.logs.items() if rule is None and name not in self._known()]
        if wrong := self._not_named(wrong, "logged as"):
            self._run.warn(
                f"What is logged as {first_few(wrong)} is the mean over microbatches, which differs from its value for "
                f"the whole batch. Log an object of torchmetrics, or use microbatches=1."
            )
        if left := self._not_named(sorted(found.left), "left in"):
            self._run.warn(
                f"training_step is called for each microbatch, and leaves other values in {first_few(left)} than for "
                f"the whole batch, such as a maximum or a list of numbers of microbatches. Pass what each sample has, "
                f"use self.log, or use microbatches=1."
            )
        batch_loss.change(self._rule)
        return len(self._rules) > 1

    # -- settings and warnings -------------------------------------------------------------------------------------

    def _by_function(self, function: Callable[[Any], float], parts: Sequence[Any]) -> list[float]:
        weights = []
        for part in parts:
            weight = function(part)
            scalar = isinstance(weight, Tensor) and weight.numel() == 1
            number = float(weight) if scalar or isinstance(weight, int | float) else math.nan
            if not 0 <= number < math.inf:
                raise ValueError(
                    f"microbatch_weight returned {weight!r}: it has to return what the loss of a microbatch averages "
                    f"over, a number of at least 0."
                )
            weights.append(number)
        return weights if any(weights) else [1.0] * len(weights)  # all 0: the loss is 0 / 0, as in one process

    def _warn_of_loss(self, problem: str) -> None:
        self._warn(
            "loss",
            f"The loss of a batch can't be put together from those of its microbatches. It is computed at "
            f"{first_few(self._lines) if self._lines else 'the end of training_step'}, and {problem}. So the loss and "
            f"its gradients differ from those of one process. Use microbatches=1"
            + (
                ", or give the strategy microbatch_weight, a function of a batch: what its loss averages over."
                if self._wanted is None
                else "."
            ),
        )

    def _not_named(self, names: Sequence[str], kind: str) -> list[str]:
        """Those, quoted, of which no warning of this kind has told."""
        new = [name for name in names if f"{kind} {name}" not in self._warned]
        self._warned.update(f"{kind} {name}" for name in new)
        return list(map(repr, new))

    def _warn(self, key: str, words: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._run.warn(words)
