"""A function of a model and a batch, run on shares of the batch by replicas of the model: the steps in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_parallel.batch import batch_size, mapped, split
from lightning_parallel.threaded_replicas.replicate import Replica, replicate
from lightning_parallel.threaded_replicas.threads import ReplicaThreads, Turns, generator_states


class Share(NamedTuple):
    """What one replica gets of a batch.

    Attributes:
        batch: on the replica's device.
        samples: the number of samples.
    """

    batch: Any
    samples: int


def scatter(batch: Any, devices: Sequence[torch.device]) -> list[Share]:
    """Shares whose sizes differ by at most one. With fewer samples than devices, the first ones get a sample each.

    Raises:
        ValueError: the batch can't be divided: see :func:`lightning_parallel.batch.batch_size`.
    """
    pieces = split(batch, min(batch_size(batch), len(devices)))
    moves = [partial(Tensor.to, device=device, non_blocking=True) for device in devices]
    return [Share(mapped(piece, move), batch_size(piece)) for piece, move in zip(pieces, moves, strict=False)]


class DataParallel:
    """Replicas of a model on devices, in one process.

    ::

        parallel = DataParallel([torch.device("cpu")] * 2)
        outputs, samples = parallel.apply(model, lambda replica, share: replica.module(share.batch), batch)
        loss = criterion(joined(outputs, samples, parallel.devices[0]), targets)
        loss.backward()  # into the model's own gradients

    Args:
        devices: one for each replica. The model is on the first. One device may be named several times.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._threads = ReplicaThreads(self.devices)
        self._draws: dict[str, bool] = {}  # did the last call of a kind draw random numbers?

    def apply(
        self,
        model: nn.Module,
        function: Callable[[Replica, Share], Any],
        batch: Any,
        *,
        kind: str = "",
        stand_in: Callable[[nn.Module, Callable[[], None]], Any] = lambda module, wait: None,
    ) -> tuple[list[Any], list[int]]:
        """Run ``function`` on every replica. What replica 0 changes in the model (buffers, attributes) stays.

        Args:
            model: on the first device.
            function: called in each replica's thread with the replica and its share of the batch.
            batch: to be divided.
            kind: of call. Replicas that draw random numbers take turns (``threads.py`` says why). The generators show
                whether they draw: the first call of a kind takes turns, and so does each that follows one that drew.
            stand_in: takes a module and a function that waits until all earlier replicas are done; returns what takes
                the module's place in the replica, or None for a copy.

        Returns:
            What each replica returned, as part of the graph of the model's weights; and each replica's number of
            samples.

        Raises:
            ValueError: the batch can't be divided, or the model can't be replicated.
            BaseException: from ``function``, with a note that names the replica.
        """
        shares = scatter(batch, self.devices)
        turns = Turns(len(shares))
        replicas = replicate(
            model, self.devices[: len(shares)], lambda module, number: stand_in(module, partial(turns.wait, number))
        )
        calls = [partial(function, replica, share) for replica, share in zip(replicas, shares, strict=True)]
        before = generator_states(self.devices)
        results = self._threads.apply(calls, turns, in_turn=self._draws.get(kind, True))
        self._draws[kind] = generator_states(self.devices) != before
        replicas[0].keep()
        return results, [share.samples for share in shares]

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
