"""Tests whether a batch's loss follows from the losses of its microbatches.

On the last stage the end of the step runs a few more times, with the activations that have come: on two neighbouring
microbatches, and on both of them as one. The loss of both must follow from the two losses by one of the rules::

    both     4 samples     loss, and what it averages over
    each     2 samples     losses ...                       -> a mean by counts? by samples? a sum? none of them?

So it is seen before the first update whether a loss is divided by something that doesn't add up (``mask.sum() + 1``),
whether it is a root or a maximum of sums, and whether it compares samples with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from lightning_parallel.batch_joins import weighted_mean
from lightning_parallel.losses.counts import count_of, numbered
from lightning_parallel.losses.graph import Number, Term, has_kink, terms_of
from lightning_parallel.losses.normaliser import Rule
from lightning_parallel.private.torch.autograd import where_created

_LOOKED_AT = 16  # terms, and nodes below each
_OF_TORCH = str(Path(torch.__file__).parent)
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4}


@dataclass
class Outcome:
    """What a run of a step has come to.

    Attributes:
        count: by what it is weighted where losses are averaged by counts.
        terms: what each of its terms averages over, by the terms' numbered keys.
        lines: where the terms are divided, or the loss is made, if torch has recorded it (``set_detect_anomaly``).
        kinked: has it a term that is no mean beyond some value?
        logged: numbers, by the names under which they were logged.
    """

    loss: float
    count: float
    terms: Mapping[str, float]
    lines: list[str]
    kinked: bool = False
    logged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """What a trial has shown.

    Attributes:
        rules: that hold for the losses.
        logs: rules that hold for what is logged, by name.
        lines: of the loss, if a run was traced.
        losses: the names under which the loss is logged.
        fixed: the keys of terms that average over the same number in the whole as in each part.
        left: the names of what the parts leave on modules for later otherwise than the whole.
    """

    rules: frozenset[Rule]
    logs: Mapping[str, frozenset[Rule]]
    lines: Sequence[str]
    losses: frozenset[str]
    fixed: frozenset[str]
    left: frozenset[str] = frozenset()


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative error of a loss that rounding may make."""
    return _TOLERANCES.get(dtype, 0.02)


def outcome(loss: Tensor, size: int, logged: dict[str, float]) -> Outcome:
    """What a step has come to on this number of samples: its loss, with its graph, and what it has logged."""
    terms = terms_of(loss)
    kinks = [term.edge.node for term in terms if has_kink(term)]
    nodes = kinks or [term.nodes[-1] for term in terms if term.nodes]
    nodes = nodes or ([] if loss.grad_fn is None else [loss.grad_fn])
    lines = dict.fromkeys(_line(where_created(node)) for node in nodes)
    return Outcome(
        float(loss.detach()),
        float(count_of(terms, loss, float(size))),
        {key: float(term.count) for key, term in numbered(terms).items()},
        [line for line in lines if line],
        bool(kinks),
        logged,
    )


def kinds_of(terms: Sequence[Term], count: Number) -> frozenset[str]:
    """What losses of the same make have in common: the operations above the sums, and the first ones below. And whether
    nothing counts in them, or just one, which may be a stand-in for nothing (``clamp(min=1)``).

    Args:
        count: what it averages over.
    """
    few = not isinstance(count, Tensor) and abs(count) <= 1
    found = {f"counts {count}"} if few else set()
    for term in terms[:_LOOKED_AT]:
        waiting, names = [term.edge.node], list[str]()
        while waiting and len(names) < _LOOKED_AT:
            node = waiting.pop()
            names.append(node.name())
            waiting += [each for each, _ in node.next_functions if each is not None]
        found.add(f"{term.key} of {' '.join(names)}")
    return frozenset(found)


def _line(stack: Sequence[str]) -> str:
    """The line of the user's code in a stack; empty if there is none."""
    for entry in reversed(stack):
        for line in entry.splitlines():
            name, _, rest = line.strip().partition('", line ')
            file = name.removeprefix('File "')
            if rest and not file.startswith(_OF_TORCH) and not file.startswith("<"):
                return f"{Path(file).name}:{rest.split(',')[0]}"
    return ""


def find(whole: Outcome, parts: Sequence[Outcome], sizes: Sequence[int], tolerance: float) -> Findings:
    """The rules by which a whole follows from its parts.

    What a mean averages over adds up. A number that doesn't, such as a factor, is no count, though a mean by it is
    right as long as microbatches are of one size.
    """
    counts = [part.count for part in parts]
    # Where nothing counts in a part, the other's number doesn't matter. A count that isn't read is that of samples.
    add_up = not all(counts) or abs(whole.count - sum(counts)) <= tolerance * abs(whole.count)

    def holding(value: float, values: Sequence[float]) -> frozenset[Rule]:
        expected = {Rule.SAMPLES: _mean(values, sizes), Rule.SUM: sum(values)}
        if not any(counts):  # a mean by counts has no value that could differ
            expected[Rule.COUNTS] = value
        elif add_up:
            expected[Rule.COUNTS] = _mean(values, counts)
        error = tolerance * max(abs(value), *map(abs, values))
        return frozenset(rule for rule, each in expected.items() if abs(each - value) <= error)

    logs: dict[str, frozenset[Rule]] = {}
    for name, value in whole.logged.items():
        values = [part.logged[name] for part in parts if name in part.logged]
        if len(values) == len(parts) and isfinite(value):
            logs[name] = holding(value, values)
    fixed = {key for key, count in whole.terms.items() if all(part.terms.get(key) == count for part in parts)}
    runs = [whole, *parts]
    errors = {name: max(abs(run.logged[name] - run.loss) for run in runs) for name in logs}
    losses = {name for name, error in errors.items() if error <= tolerance * abs(whole.loss)}
    rules = frozenset() if any(run.kinked for run in runs) else holding(whole.loss, [part.loss for part in parts])
    return Findings(rules, logs, whole.lines, frozenset(losses), frozenset(fixed))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return float(weighted_mean(torch.tensor(values, dtype=torch.float64).unbind(), weights))


def joined(one: Tensor, other: Tensor, sizes: tuple[int, int], *, of_samples: bool = False) -> Tensor | None:
    """An activation of two microbatches; one of them, if it is of no sample, such as encoded positions. None if it
    doesn't tell where its samples lie.

    Args:
        one: ``[samples, ...]``, ``[samples * positions, ...]`` or ``[positions, samples, ...]``.
        other: the same of the other microbatch.
        of_samples: equal ones have rows for samples too, as a mask that a step repeats for each sample and head.
    """
    shapes = one.shape, other.shape
    found = [dim for dim in range(min(2, one.dim())) if tuple(shape[dim] for shape in shapes) == sizes]
    # What is of no sample is the same in both. It may have as many heads as there are samples, or rows for each.
    if not of_samples and torch.equal(one, other) and (not found or (len(one) == 1 < sizes[0])):
        return one
    dim = found[0] if found else 0
    if one.dim() and one.dim() == other.dim():
        rows = {divmod(shape[dim], size) for shape, size in zip(shapes, sizes, strict=True)}
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len(rows) == len(rest) == 1 and not any(left for _, left in rows):
            return torch.cat((one, other), dim)
    return None


def joins(whole: Tensor, one: Tensor, other: Tensor, sizes: tuple[int, int]) -> bool:
    """Is what a layer gives for two microbatches as one what it gives for each of them?"""
    either = (joined(one, other, sizes, of_samples=of_samples) for of_samples in (False, True))
    parts = next((each for each in either if each is not None and each.shape == whole.shape), None)
    if parts is None:
        return False  # both depend on their samples, but nothing shows along which dimension these lie
    if not whole.is_floating_point():
        return torch.equal(parts, whole)
    tolerance = 10 * tolerance_of(whole.dtype) * float(whole.abs().max().nan_to_num())
    return torch.allclose(parts, whole, 0.0, tolerance, equal_nan=True)
