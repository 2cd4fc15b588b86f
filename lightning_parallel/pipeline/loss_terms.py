"""A batch's loss from microbatches, where it isn't a mean over samples.

A batch in microbatches of sizes s_k has the loss sum_k s_k / s * loss_k. That is the loss of the undivided batch if the
loss is a mean over samples. A language model's is a mean over labels that aren't ignored, and their number n_k isn't
the same in all microbatches::

    samples  labels that count   mean over labels      divided here by
    0, 1     12                  sum_0 / 12            16 * 2 / 4 = 8
    2, 3      4                  sum_1 /  4            16 * 2 / 4 = 8        2/4 * sum_0/8 + 2/4 * sum_1/8 = sum / 16

So each such *term* of the loss is divided by the batch's number, shared out by samples. Several terms may count
different things, and what a step logs is right by the same token. While the first microbatch of a batch runs on the
last stage, the code around the layers is watched (``recording.py``). At a call that averages, the other microbatches'
numbers are computed as the user's code would (``replay.py``). In the other microbatches the same calls, in the same
order, get their divisors (``watching.py``), if any term needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.batch import tensors
from lightning_parallel.pipeline.averaging import Average
from lightning_parallel.pipeline.batch_record import Record
from lightning_parallel.pipeline.replay import Known

Warn = Callable[[str, str], None]  # a key, of which the first warning is shown, and the words
Divisor = Tensor | float  # a scalar that stays on its device, where nothing is checked

_PROBABLY_EQUAL = 1e-6  # relative; sums of class weights are rounded


@dataclass
class Term:
    """One call that averages, in all microbatches of a batch.

    Attributes:
        name: of its function.
        place: where the user's code calls it.
        divisors: of each microbatch by itself; None if they can't be known ahead.
        total: of the batch.
        shared: what is divided grows with the number of samples, so the total is shared out by samples.
        each: what was seen first of a divisor that can't be known ahead, for each sample.
    """

    name: str
    place: str
    divisors: list[Divisor] | None = None
    total: Divisor = 0.0
    shared: bool = True
    each: float | None = None

    def __str__(self) -> str:
        return f"The {self.name} at {self.place}"


class LossTerms:
    """The terms of one batch's loss.

    Args:
        batch: as the user's loader gave it.
        parts: its microbatches.
        sizes: of the microbatches.
        warn: shows a warning, each key's once.
        checks: compare each divisor with what was foreseen. On a GPU the host has to wait for it. Without, divisors
            stay where they are, and no host reads them.

    Attributes:
        terms: a place for each call of a function that may average, in order; None for what isn't a term.
        recorded: has a microbatch begun, in which they are found?
    """

    def __init__(
        self,
        batch: Any,
        parts: Sequence[Any],
        sizes: Sequence[int],
        *,
        warn: Warn,
        checks: bool,
    ) -> None:
        self._batch, self._parts = batch, parts
        self.sizes, self.size = sizes, sum(sizes)
        self.warn, self.checks = warn, checks
        self.terms: list[Term | None] = []
        self.recorded = False

    def leaves(self, number: int) -> list[Tensor]:
        """The tensors of a microbatch."""
        return list(tensors(self._parts[number]))

    @property
    def need_watching(self) -> bool:
        """Do the microbatches after the first one need other divisors, or to be looked at?"""
        microbatches = range(len(self.sizes))
        return any(
            self.checks if term.divisors is None else any(self.divisor(term, k) is not None for k in microbatches)
            for term in self.terms
            if term is not None
        )

    def divisor(self, term: Term, number: int) -> Divisor | None:
        """By what a term is divided in a microbatch; None for what its call divides by itself."""
        if term.divisors is None:
            return None
        own, divisor = term.divisors[number], term.total
        if term.shared:
            divisor = divisor * self.sizes[number] / self.size
        if isinstance(own, Tensor) or isinstance(divisor, Tensor):
            return divisor  # whether it is the call's own isn't read
        return divisor if divisor and divisor != own else None  # 0 / 0 is not a number, as in one process

    def foreseen(self, record: Record, average: Average, wanted: list[int | Known | None]) -> list[Divisor] | None:
        """The divisors of all microbatches, and of a division's batch; None if they can't be computed ahead."""
        program = record.program((number for number in wanted if number is not None), counted=average.counted)
        batches = [*self._parts, self._batch] if average.numerator is not None else self._parts
        found: list[Divisor] = []
        try:
            for batch in batches:
                computed = iter(program.run(list(tensors(batch))))
                given = (
                    constant if number is None else next(computed)
                    for number, constant in zip(wanted, average.given, strict=True)
                )
                found.append(average.divisor(*given))
        except Exception:  # whatever the user's functions raise for a batch that they weren't written for
            return None
        if self.checks:
            return [*numbers(found)]
        return [each.detach().double().reshape(()) if isinstance(each, Tensor) else float(each) for each in found]


def numbers(values: Sequence[Divisor]) -> list[float]:
    """Scalars as numbers. The host waits for a GPU once."""
    scalars = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    known = iter(torch.stack(scalars).tolist() if scalars else ())
    return [next(known) if isinstance(value, Tensor) else float(value) for value in values]


def check(terms: LossTerms, term: Term, number: int, own: float) -> None:
    """Compare a term's own divisor in a microbatch with what is known of it.

    Raises:
        RuntimeError: another one was foreseen.
    """
    if term.divisors is not None:
        foreseen = float(term.divisors[number])  # a number already, where there are checks
        guarded = term.name == "division" and not foreseen  # max(count, 1), which Python has computed
        if not guarded and not nearly(own, foreseen):
            raise changed(
                f"{term} averages over {own:g} in microbatch {number}, but {foreseen:g} was computed from the batch "
                f"beforehand"
            )
        return
    each = own / terms.sizes[number]
    if term.each is None:
        term.each = each
    elif not nearly(each, term.each):
        terms.warn(
            f"{term}",
            f"{term} averages over a number that differs between samples and that can't be computed from the batch "
            f"before the step runs, since it depends on random numbers, on the model, or on values that Python has "
            f"read. So microbatches are weighted by their samples, and the loss isn't that of the undivided batch. "
            f"Give the strategy microbatch_weight, a function of a batch that returns the number, or microbatches=1.",
        )


def nearly(a: float, b: float) -> bool:
    """Equal but for rounding."""
    return abs(a - b) <= _PROBABLY_EQUAL * max(abs(a), abs(b))


def changed(problem: str) -> RuntimeError:
    """The error of a step that does something else than was foreseen."""
    return RuntimeError(
        f"{problem}. The loss of the batch can't be computed in microbatches like this. Give the strategy "
        f"microbatch_weight, a function of a batch that returns what its loss averages over, or microbatches=1."
    )
