"""What it takes to load a batch: the first ones of a loader are loaded."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_parallel.comparison.runs import batches_of
from lightning_parallel.loading.loaders import with_one_worker

_BATCHES = 4  # that are loaded; the first one may take longer, and isn't timed unless there is no other
_LONG = 1.0  # seconds of the others, after which no more are


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
            where = f"in one of each rank's {self.workers} workers" if self.workers else "without workers"
            yield f"Data: {1000 * self.seconds:.3g} ms to load a batch, {where}."


def first_batch(loader: Iterable[Any]) -> Loaded:
    """The first batch of a loader. If it has workers, one of them loads it, and a few more: a dataset may need to be in
    a worker. The loader's own workers and its generator stay as they are.

    Raises:
        ValueError: it has none.
    """
    workers, generator = 0, None
    if isinstance(loader, CombinedLoader):  # what all of its loaders' workers do together counts as one worker's
        workers = int(any(getattr(each, "num_workers", 0) for each in loader.flattened))
    elif isinstance(loader, DataLoader):
        workers, generator, loader = loader.num_workers, loader.generator, with_one_worker(loader)
    before = None if generator is None else generator.get_state()
    first, times, start = None, [], time.perf_counter()
    for batch in batches_of(loader):
        times.append(time.perf_counter() - start)
        first = batch if len(times) == 1 else first
        if len(times) == _BATCHES or sum(times[1:]) > _LONG:
            break
        start = time.perf_counter()
    if not times:
        raise ValueError("data gives no batches.")
    if generator is not None:
        generator.set_state(before)
    return Loaded(first, median(times[1:] or times), workers)
