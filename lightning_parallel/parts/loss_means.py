"""Weights the losses of microbatches: by what each averages over, or by ``microbatch_weight``.

The rule is tried in the first batch (:mod:`lightning_parallel.pipeline.loss_trial`), on the last stage, where losses
are. What can't be right is warned of once, by the lines that divide the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_parallel.batch import sizes as sizes_of
from lightning_parallel.batch import split_into
from lightning_parallel.checkpoint.agreement import first_few
from lightning_parallel.parts.last_stage import LastStage
from lightning_parallel.parts.logs import logging_trial
from lightning_parallel.pipeline.chunk import Again, Trial
from lightning_parallel.pipeline.kept_state import StateKept
from lightning_parallel.pipeline.loss_graph import Term, terms_of
from lightning_parallel.pipeline.loss_trial import Findings, Outcome, find, kinds_of, outcome, parts_of, sliced
from lightning_parallel.pipeline.normaliser import BatchLoss, Rule, count_of, main_term

_NORMALISE_OVER_SAMPLES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_UNTRIED = 3  # batches without a trial that has shown anything are warned of
_TRIALS = 8  # at most in a run; a step that makes its loss in ever new ways is tried no more

Step = Callable[[Any], Callable[[], Tensor]]  # makes the step of a batch, which returns the loss


@dataclass(frozen=True)
class _Awaited:
    """A microbatch of one sample, which waits for another one to be tried with.

    Attributes:
        batch: the batch that it is of.
        place: its index there.
        arrived: its activations.
    """

    batch: Any
    place: int
    arrived: list[Tensor]


class LossMeans:
    """The losses of batches.

    Args:
        trainer: of the run.
        module: whose loss it is.
        wanted: the setting ``microbatch_weight``.
        last_stage: in whose name steps run that don't count.
        known: gives the names whose value for the whole batch is known without the layers.
        is_last_stage: losses are computed here.

    Attributes:
        logs: rules for what steps log, by name, as far as they are known.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        wanted: Callable[[Any], float] | None,
        last_stage: LastStage,
        *,
        known: Callable[[], Container[str]],
        is_last_stage: bool,
    ) -> None:
        self._trainer, self._module = trainer, module
        self._wanted = wanted
        self._last_stage = last_stage
        self._known = known
        self._is_last_stage = is_last_stage
        self._warned: set[str] = set()
        self._is_first_batch = True
        self._rule = Rule.COUNTS
        self._rules = frozenset(Rule)  # of which it is one
        self._rules_of_logs: dict[str, frozenset[Rule]] = {}
        self._per_sample: float | None = None  # what a sample's loss averaged over in the last trial
        self._tried: set[frozenset[str]] = set()  # the kinds of losses that have been
        self._keeps_activations = True  # of the next microbatch, to try it with
        self._trials = 0
        self._batches = 0  # of several microbatches
        self._awaited: _Awaited | None = None
        self._differs: bool | Tensor = False  # did the last batch's terms?
        self._fixed: frozenset[str] = frozenset()
        self._lines: Sequence[str] = ()
        self.logs: dict[str, Rule | None] = {}

    def of(self, parts: Sequence[Any], sizes: Sequence[int]) -> BatchLoss:
        """The loss of a batch.

        Args:
            parts: the batch's microbatches.
            sizes: of the microbatches.

        Raises:
            ValueError: ``microbatch_weight`` returned something else than a number of at least 0.
        """
        first, self._is_first_batch = self._is_first_batch, False
        batches = self._trainer.accumulate_grad_batches
        if len(parts) == 1:
            return BatchLoss(sizes, batches=batches)
        if first:
            self._warn_of_batch_norm(sizes)
        if self._wanted is None:
            return BatchLoss(sizes, self._rule, batches=batches)
        # In the first batch on all stages, so that an error is raised on all.
        given = self._by_function(self._wanted, parts) if first or self._is_last_stage else None
        return BatchLoss(sizes, given=given, batches=batches)

    # -- trials ----------------------------------------------------------------------------------------------------

    def trial(self, step: Step, batch: Any, sizes: Sequence[int], place: int, batch_loss: BatchLoss) -> Trial | None:
        """What a microbatch on the last stage is tried with; None if nothing is to be tried.

        Args:
            step: makes the user's step of a part of the batch.
            batch: as the loader gave it.
            sizes: of its microbatches.
            place: of the microbatch.
            batch_loss: of the batch.
        """
        if len(sizes) == 1 or self._wanted is not None or not self._is_last_stage or self._trials >= _TRIALS:
            return None
        return Trial(lambda: self._keeps_activations, partial(self._try, step, batch, sizes, place, batch_loss))

    def _try(
        self,
        step: Step,
        batch: Any,
        sizes: Sequence[int],
        place: int,
        batch_loss: BatchLoss,
        loss: Tensor,
        terms: list[Term],
        again: Again,
    ) -> None:
        terms = terms or terms_of(loss)
        kinds = kinds_of(terms)
        share = count_of(terms, loss, 0.0) if main_term(terms, None) is not None else None
        per_sample = share / sizes[place] if isinstance(share, float) else None
        # Where each sample counts alike, several rules hold. Which one does is seen where they don't.
        if kinds in self._tried and (len(self._rules) == 1 or per_sample == self._per_sample is not None):
            return
        if again.arrived is None:
            self._keeps_activations = True
            return
        size = sizes[place]
        first, arrived = place, again.arrived
        if size == 1:
            before, self._awaited = self._awaited, _Awaited(batch, place, arrived)
            if before is None or before.batch is not batch:
                return
            first, size = before.place, 2
            joined = [_joined(pair) for pair in zip(before.arrived, arrived, strict=True)]
            if any(tensor is None for tensor in joined):
                return
            arrived = [tensor for tensor in joined if tensor is not None]
        self._awaited = None
        self._trials += 1
        lengths = [*sizes[:first], size, *sizes[place + 1 :]]
        keys = frozenset(term.key for term in terms)
        found = self._found(step, split_into(batch, lengths)[first], size, arrived, again, keys)
        if found is None:
            return
        self._tried.add(kinds)
        self._per_sample = per_sample
        self._keeps_activations = len(self._rules & found.rules) > 1 and per_sample is None
        self._take(found)
        batch_loss.change(self._rule)

    def _found(
        self, step: Step, part: Any, size: int, arrived: list[Tensor], again: Again, keys: frozenset[str]
    ) -> Findings | None:
        lengths = sizes_of(size, parts_of(size))
        pieces = [sliced(tensor, size, lengths) for tensor in arrived]
        if any(piece is None for piece in pieces):
            return None
        columns = [[piece[i] for piece in pieces if piece is not None] for i in range(len(lengths))]

        def run(part: Any, tensors: Sequence[Tensor], seed: int = 0) -> Outcome:
            with self._without_effect(seed) as logged:
                return outcome(lambda: (again.run(step(part), tensors), _numbers(logged)))

        try:
            whole = run(part, arrived)
            parts = [run(piece, column) for piece, column in zip(split_into(part, lengths), columns, strict=True)]
            if not math.isfinite(whole.loss) or whole.keys != keys:
                return None
            tolerance = _TOLERANCES.get(again.dtype, 0.02)
            found = find(whole, parts, lengths, tolerance)
            if found.rules and sum(part.loss != 0 for part in parts) < 2:
                return None  # any rule would have held
            drawn = not (found.rules and all(found.logs.values()))
            other = run(part, arrived, seed=1) if drawn else whole
        except (ValueError, RuntimeError, IndexError, TypeError, AttributeError, KeyError, AssertionError):
            return None  # the step wasn't made for so few samples
        if not found.rules and other.loss != whole.loss:
            return None  # by random numbers
        logs = {name: rule for name, rule in found.logs.items() if other.logged.get(name) == whole.logged[name]}
        return replace(found, logs=logs)

    @contextmanager
    def _without_effect(self, seed: int) -> Any:
        """Inside, a step doesn't count, and layers draw nothing. It gives the calls of ``self.log``."""
        others = [part for part in self._module.modules() if part is not self._module and part.training]
        with ExitStack() as kept:
            kept.enter_context(StateKept(self._module, parameters=False))
            logged = kept.enter_context(logging_trial(self._trainer, self._module))
            kept.enter_context(self._last_stage.alone("training_step", seed))
            for part in others:
                part.training = False
            try:
                yield logged
            finally:
                for part in others:
                    part.training = True

    def check(self, loss: BatchLoss) -> None:
        """All microbatches of a batch have run: warn if no weights suit its loss. A GPU's answer is read in the next
        batch, when it has come."""
        answer, self._differs = self._differs, loss.differs(self._fixed) if "loss" not in self._warned else False
        if bool(answer) or (isinstance(self._differs, bool) and self._differs):
            self._warn_of_loss("has several terms, which average over numbers whose ratio differs between microbatches")
        self._batches += len(loss.sizes) > 1 and self._wanted is None
        if self._batches == _UNTRIED and not self._tried:
            self._warn(
                "untried",
                "It could not be tried whether the loss of a batch follows from those of its microbatches: "
                "training_step fails on parts of a microbatch, computes another loss while layers are in eval mode, or "
                "draws random numbers. The losses are combined by what each averages over. "
                "This is right for means over samples, labels or masks. "
                "If samples are compared with each other, use microbatches=1.",
            )

    def _take(self, found: Findings) -> None:
        self._fixed |= found.fixed
        self._lines = found.lines
        self._rules &= found.rules
        if self._rules:
            self._rule = next(rule for rule in Rule if rule in self._rules)
        else:
            self._rules = frozenset(Rule)
            self._warn_of_loss(
                "is neither a mean over samples, nor over a number that adds up over microbatches, nor a sum: samples "
                "may be compared with each other, several terms may average over different numbers, or the mean is "
                "rooted or smoothed"
            )
        for name, rules in found.logs.items():
            rules = self._rules_of_logs[name] = self._rules_of_logs.get(name, frozenset(Rule)) & rules
            first = Rule.SAMPLES if Rule.SAMPLES in rules else Rule.COUNTS
            self.logs[name] = next((rule for rule in (first, *Rule) if rule in rules), None)
        self.logs |= dict.fromkeys(found.losses & found.logs.keys(), self._rule)
        wrong = [name for name, rule in self.logs.items() if rule is None and name not in self._known()]
        if wrong:
            self._warn(
                "logs",
                f"What is logged as {first_few([repr(name) for name in wrong])} is the mean over microbatches, which "
                f"differs from its value for the whole batch. Log an object of torchmetrics, or use microbatches=1.",
            )

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
            f"its gradients differ from those of one process. Use microbatches=1, or give the strategy "
            f"microbatch_weight, a function of a batch that returns what its loss averages over.",
        )

    def _warn(self, key: str, words: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(words)

    def _warn_of_batch_norm(self, sizes: Sequence[int]) -> None:
        for name, part in self._module.named_modules():
            if isinstance(part, _NORMALISE_OVER_SAMPLES) and part.training:
                self._warn(
                    "batch norm",
                    f"'{name}' is a {type(part).__name__}, which normalises over the {sizes[0]} samples of a "
                    f"microbatch, not over the {sum(sizes)} of a batch: the loss differs from that of one process. Use "
                    f"microbatches=1, or GroupNorm or LayerNorm.",
                )
                return


_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}


def _joined(pair: tuple[Tensor, Tensor]) -> Tensor | None:
    """The activations of two samples."""
    first, second = pair
    dim = next((dim for dim in range(min(2, first.dim())) if first.shape[dim] == 1), 0)
    return torch.cat(pair, dim) if first.dim() and first.shape == second.shape else None


def _numbers(logged: Sequence[tuple[Any, ...]]) -> dict[str, float]:
    """What a step has logged as the mean of numbers, by name."""
    found: dict[str, float] = {}
    for (name, value, *_), options in logged:
        scalar = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
        if scalar and options.get("reduce_fx", "mean") == "mean" and options.get("batch_size") is None:
            found[name] = float(value)
    return found
