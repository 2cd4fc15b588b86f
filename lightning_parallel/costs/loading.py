"""What it takes to load a batch: tried in this process, without workers."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch.utils.data import DataLoader

_BATCHES = 4  # that are timed: the first one of a dataset may take longer
_LONG = 1.0  # seconds, after which no more are


@dataclass(frozen=True)
class Loaded:
    """A batch of all replicas together.

    Attributes:
        seconds: in which one process loads it; 0 if it was given.
        workers: of each rank, which load ahead. Without them a step begins when its batch has been loaded.
    """

    batch: Any
    seconds: float = 0.0
    workers: int = 0

    def waited(self, step: float, replicas: int, speed: float) -> float:
        """The seconds that a step waits for its replica's share of the batch.

        Args:
            step: seconds of the rest.
            speed: of a rank, as :meth:`.Device.speed` has it.
        """
        own = self.seconds / replicas / speed
        return max(0.0, own / self.workers - step) if self.workers else own

    def notes(self) -> Iterator[str]:
        """What the time of loading rests on."""
        if self.seconds:
            ahead = f"{self.workers} workers of each rank load ahead" if self.workers else "no workers load ahead"
            yield f"Data: {1000 * self.seconds:.3g} ms to load a batch, tried in this process; {ahead}."


def first_batch(loader: Iterable[Any]) -> Loaded:
    """The first batch of a loader.

    Raises:
        ValueError: it has none.
    """
    workers = 0
    if isinstance(loader, DataLoader):
        workers = loader.num_workers
        alone = copy.copy(loader)
        alone.num_workers, alone.timeout = 0, 0  # a time limit is one for workers
        loader = alone
    first, times, start = None, [], time.perf_counter()
    for batch in loader:
        times.append(time.perf_counter() - start)
        first = batch if len(times) == 1 else first
        if len(times) == _BATCHES or sum(times) > _LONG:
            break
        start = time.perf_counter()
    if not times:
        raise ValueError("data gives no batches.")
    return Loaded(first, median(times[1:] or times), workers)
