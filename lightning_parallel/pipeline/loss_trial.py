"""Tests whether a batch's loss follows from the losses of its microbatches.

On the last stage the end of the first microbatch's step runs a few more times: on the whole microbatch, and on parts of
it, with the same activations. The loss of the whole must follow from those of the parts by one of the rules::

    whole    4 samples     loss, and what it averages over
    parts    1 sample      losses ...                       -> a mean by counts? by samples? a sum? none of them?

So it is seen before the first update whether a loss is divided by something that doesn't add up (``mask.sum() + 1``),
whether it is a root or a maximum of sums, and whether it compares samples with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_parallel.pipeline.loss_graph import Term, terms_of
from lightning_parallel.pipeline.normaliser import Rule, count_of, main_term, numbered
from lightning_parallel.torch_private import where_created

_PARTS = 4  # a microbatch is divided into at most
_LOOKED_AT = 16  # terms, and nodes below each
_OF_TORCH = str(Path(torch.__file__).parent)


@dataclass
class Outcome:
    """What a run of a step has come to.

    Attributes:
        loss: its value.
        count: what it averages over; None if that can't be read off its graph.
        keys: of its terms.
        terms: what each of its terms averages over, by the terms' numbered keys.
        lines: where the terms are divided, or the loss is made.
        logged: numbers, by the names under which they were logged.
    """

    loss: float
    count: float | None
    keys: frozenset[str]
    terms: Mapping[str, float]
    lines: list[str]
    logged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """What a trial has shown.

    Attributes:
        rules: that hold for the losses.
        logs: rules that hold for what is logged, by name.
        lines: of the loss.
        losses: the names under which the loss is logged.
        fixed: the keys of terms that average over the same number in the whole as in each part.
    """

    rules: frozenset[Rule]
    logs: Mapping[str, frozenset[Rule]]
    lines: Sequence[str]
    losses: frozenset[str]
    fixed: frozenset[str]


def outcome(step: Callable[[], tuple[Tensor, dict[str, float]]]) -> Outcome:
    """Run a step, and read its loss.

    Args:
        step: returns the loss, with its graph, and what it has logged.
    """
    anomalies = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)  # nodes then tell from which lines they come
    try:
        loss, logged = step()
    finally:
        torch.autograd.set_detect_anomaly(*anomalies)
    terms = terms_of(loss)
    averages = main_term(terms, None) is not None
    assert loss.grad_fn is not None
    nodes = [term.node for term in terms if term.node is not None] or [loss.grad_fn]
    return Outcome(
        float(loss.detach()),
        float(count_of(terms, loss, 0.0)) if averages else None,
        frozenset(term.key for term in terms),
        {key: float(term.count) for key, term in numbered(terms).items()},
        lines_of(nodes),
        logged,
    )


def kinds_of(terms: Sequence[Term]) -> frozenset[str]:
    """What losses of the same make have in common: the operations above the sums, and the first ones below."""
    found = set()
    for term in terms[:_LOOKED_AT]:
        waiting, names = [term.edge.node], list[str]()
        while waiting and len(names) < _LOOKED_AT:
            node = waiting.pop()
            names.append(node.name())
            waiting += [each for each, _ in node.next_functions if each is not None]
        found.add(f"{term.key} of {' '.join(names)}")
    return frozenset(found)


def lines_of(nodes: Sequence[Node]) -> list[str]:
    """Where the user's code has made nodes of a graph, each line once."""
    lines = dict.fromkeys(_line(where_created(node)) for node in nodes)
    return [line for line in lines if line]


def _line(stack: Sequence[str]) -> str:
    for entry in reversed(stack):
        for line in entry.splitlines():
            name, _, rest = line.strip().partition('", line ')
            file = name.removeprefix('File "')
            if rest and not file.startswith(_OF_TORCH) and not file.startswith("<"):
                return f"{Path(file).name}:{rest.split(',')[0]}"
    return ""


def find(whole: Outcome, parts: Sequence[Outcome], sizes: Sequence[int], tolerance: float) -> Findings:
    """The rules by which a whole follows from its parts.

    Args:
        whole: of all samples.
        parts: of parts of them.
        sizes: of the parts.
        tolerance: relative.
    """
    counts = [part.count for part in parts]
    known = [count for count in counts if count is not None]
    weights: dict[Rule, Sequence[float] | None] = {
        Rule.COUNTS: known if len(known) == len(parts) and any(known) else None,
        Rule.SAMPLES: [float(size) for size in sizes],
        Rule.SUM: None,
    }

    def holding(value: float, values: Sequence[float]) -> frozenset[Rule]:
        expected = {rule: sum(values) if rule is Rule.SUM else _mean(values, weights[rule]) for rule in Rule}
        error = tolerance * max(abs(value), *map(abs, values))
        return frozenset(rule for rule, each in expected.items() if each is not None and abs(each - value) <= error)

    logs: dict[str, frozenset[Rule]] = {}
    for name, value in whole.logged.items():
        values = [part.logged[name] for part in parts if name in part.logged]
        if len(values) == len(parts) and isfinite(value):
            logs[name] = holding(value, values)
    fixed = {key for key, count in whole.terms.items() if all(part.terms.get(key) == count for part in parts)}
    runs = [whole, *parts]
    errors = {name: max(abs(run.logged[name] - run.loss) for run in runs) for name in logs}
    losses = {name for name, error in errors.items() if error <= tolerance * abs(whole.loss)}
    rules = holding(whole.loss, [part.loss for part in parts])
    return Findings(rules, logs, whole.lines, frozenset(losses), frozenset(fixed))


def _mean(values: Sequence[float], weights: Sequence[float] | None) -> float | None:
    if weights is None:
        return None
    counting = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(value * weight for value, weight in counting) / sum(weights) if counting else None


def parts_of(size: int) -> int:
    """Into how many parts samples are divided."""
    return min(size, _PARTS)


def sliced(tensor: Tensor, size: int, sizes: Sequence[int]) -> list[Tensor] | None:
    """An activation of so many samples, in parts of these sizes. None if it doesn't tell where its samples lie.

    Args:
        tensor: ``[samples, ...]``, ``[samples * positions, ...]`` or ``[positions, samples, ...]``.
        size: the number of samples.
        sizes: of the parts; their sum is ``size``.
    """
    if not tensor.dim():
        return None
    dim = next((dim for dim in range(min(2, tensor.dim())) if tensor.shape[dim] == size), 0)
    if tensor.shape[dim] % size:
        return None
    rows = tensor.shape[dim] // size
    return [piece.clone() for piece in tensor.split([rows * part for part in sizes], dim)]
