"""Where the chain of layers is cut: by weight, by count, or where the user says."""

from __future__ import annotations

from collections.abc import Sequence

Balance = str | Sequence[int]


def bounds_of(costs: Sequence[int], trainable: Sequence[bool], stages: int, balance: Balance) -> list[int]:
    """Stage s gets the layers from the s-th to the next bound.

    Args:
        costs: of each layer, its parameters with those of what goes with it.
        trainable: which layers learn.
        stages: at most as many as layers.
        balance: ``"parameters"``, ``"layers"``, or the number of layers of each stage.

    Raises:
        ValueError: ``balance`` is none of these.
    """
    if not isinstance(balance, str):
        counts = list(balance)
        if len(counts) != stages or sum(counts) != len(costs) or min(counts) < 1:
            raise ValueError(
                f"balance={counts}: give {stages} positive layer counts, one a stage, that sum to {len(costs)}."
            )
        return [sum(counts[:stage]) for stage in range(stages + 1)]
    if balance == "layers":
        return [round(stage * len(costs) / stages) for stage in range(stages + 1)]
    if balance != "parameters":
        raise ValueError(f"balance={balance!r}: use 'parameters', 'layers', or a list of layer counts.")
    return balanced(costs, trainable, stages)


def balanced(costs: Sequence[int], trainable: Sequence[bool], stages: int) -> list[int]:
    """Contiguous split whose largest stage is smallest; among those, the one with the least sum of squares. A stage
    without a trainable parameter is taken only where there is no other way.

    Dynamic programming over (stages used, layers used): O(stages x layers^2), for chains of up to some hundreds.
    """
    count = len(costs)
    prefix = [0]
    learns = [0]
    for cost, learn in zip(costs, trainable, strict=True):
        prefix.append(prefix[-1] + cost)
        learns.append(learns[-1] + learn)
    worst = (count + 1, 0, 0)
    best: dict[tuple[int, int], tuple[tuple[int, int, int], int]] = {(0, 0): ((0, 0, 0), 0)}
    for stage in range(1, stages + 1):
        for end in range(stage, count - (stages - stage) + 1):
            value, where = worst, -1
            for start in range(stage - 1, end):
                if (stage - 1, start) not in best:
                    continue
                (idle, largest, squares), _ = best[stage - 1, start]
                cost = prefix[end] - prefix[start]
                idle += learns[end] == learns[start]
                candidate = (idle, max(largest, cost), squares + cost * cost)
                if candidate < value:
                    value, where = candidate, start
            best[stage, end] = (value, where)
    bounds = [count]
    for stage in range(stages, 0, -1):
        bounds.append(best[stage, bounds[-1]][1])
    return bounds[::-1]
