"""Activations and copies of weights that a stage holds at once, counted where they are kept alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel.schedules.asynchronous import AsyncOneFOneB
from lightning_parallel.schedules.named import SCHEDULES, asynchronous
from recipes.tables import Table
from tools.bench import processes
from tools.bench.contestants import Contestant, Ours, OursAsync, Torch
from tools.schedule.costs import peak_activations


@dataclass(frozen=True)
class Sizes:
    stages: int = 4
    microbatches: int = 8
    batches: int = 3


QUICK = Sizes()


class _Held:
    """Lives as long as autograd keeps what one forward saved."""

    def __init__(self, weights: int) -> None:
        self.weights = weights  # address of what the forward read


class CountingLayer(nn.Module):
    """Counts the forwards whose saved tensors are alive, and the versions of its weight that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.activations = self.versions = 0  # most at once
        self._alive: WeakSet[_Held] = WeakSet()

    def forward(self, x: Tensor) -> Tensor:
        held = _Held(self.weight.data_ptr())
        with saved_tensors_hooks(lambda tensor: (tensor, held), lambda saved: saved[0]):
            output = x * self.weight
        self._alive.add(held)
        self.activations = max(self.activations, len(self._alive))
        self.versions = max(self.versions, len({each.weights for each in self._alive}))
        return output


def measure(sizes: Sizes) -> list[Table]:
    ranks = processes.run(_counts, sizes.stages, sizes)
    rows: list[list[str]] = []
    for name in ranks[0]:
        counts = sorted(counts[name] for counts in ranks)
        activations, copies = _theory(name, sizes)
        held = [activations for _, activations, _ in counts]
        copied = [versions - 1 for _, _, versions in counts]
        rows.append([name, *map(_list, (held, activations, copied, copies))])
    return [
        Table(
            f"Held at once, stage by stage: {sizes.stages} stages, {sizes.microbatches} microbatches a batch",
            {"schedule": "", "activations": "", "theory": "", "weight copies": "", "theory, copies": ""},
            rows,
            "Activations in microbatches; weight copies beside the current weights. What autograd saved is counted.",
        )
    ]


def _theory(name: str, sizes: Sizes) -> tuple[list[int], list[int]]:
    kind, _, rest = name.partition(", ")
    if kind in SCHEDULES:
        schedule = SCHEDULES[kind](sizes.stages, sizes.microbatches)
        return peak_activations(schedule), [0] * sizes.stages
    microbatches, extra = (int(word) for word in rest.split() if word.isdigit())
    peaks = peak_activations(asynchronous(sizes.stages, microbatches, 8 * sizes.stages, extra))
    ahead = [AsyncOneFOneB(sizes.stages, stage, extra).warmup for stage in range(sizes.stages)]
    return peaks, [-(-warmup // microbatches) for warmup in ahead]


def _counts(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """By contestant: this rank's stage, most activations and most versions of the weights at once."""
    stages, m = dist.get_world_size(), sizes.microbatches
    whole, single = torch.randn(m, 4), torch.randn(1, 4)
    contestants: dict[str, Callable[[nn.Sequential], Contestant]] = {
        "gpipe, ours": lambda layers: Ours(layers, "gpipe", whole, m),
        "gpipe, torch": lambda layers: Torch(layers, "gpipe", whole, m),
        "1f1b, ours": lambda layers: Ours(layers, "1f1b", whole, m),
        "1f1b, torch": lambda layers: Torch(layers, "1f1b", whole, m),
        "async, 1 an update, 0 extra in flight": lambda layers: OursAsync(layers, single, 1),
        "async, 1 an update, 1 extra in flight": lambda layers: OursAsync(layers, single, 1, 1),
        f"async, {m} an update, 0 extra in flight": lambda layers: OursAsync(layers, whole, m),
    }
    counts: dict[str, tuple[int, int, int]] = {}
    for name, make in contestants.items():
        layers = nn.Sequential(*(CountingLayer() for _ in range(stages)))
        contestant = make(layers)
        for _ in range(sizes.batches if isinstance(contestant, (Ours, Torch)) else 4 * stages):
            contestant.step()
        contestant.drain()
        stage = stages - 1 - dist.get_rank() if "ours" in name or "async" in name else dist.get_rank()
        counts[name] = (stage, layers[stage].activations, layers[stage].versions)  # type: ignore[assignment]
    return counts


def _list(values: list[int]) -> str:
    return " ".join(map(str, values))
