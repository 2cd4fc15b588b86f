"""A function of a model and a batch, run on shares of the batch by replicas of the model: the steps in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.batch import batch_size, mapped, split
from lightning_parallel.local_replicas.join import joined
from lightning_parallel.local_replicas.replicate import replicate


class Share(NamedTuple):
    """What one replica gets of a batch.

    Attributes:
        batch: on the replica's device.
        samples: the number of samples.
        device: where the replica is.
    """

    batch: Any
    samples: int
    device: torch.device


def scatter(batch: Any, devices: Sequence[torch.device]) -> list[Share]:
    """Shares whose sizes differ by at most one. With fewer samples than devices, the first ones get a sample each.

    Raises:
        ValueError: the batch can't be divided: see :func:`lightning_parallel.batch.batch_size`.
    """
    pieces = split(batch, min(batch_size(batch), len(devices)))
    return [
        Share(mapped(piece, partial(Tensor.to, device=device, non_blocking=True)), batch_size(piece), device)
        for piece, device in zip(pieces, devices, strict=False)
    ]


def on_replicas(
    function: Callable[[Any, Share], Any], model: nn.Module, batch: Any, devices: Sequence[torch.device]
) -> Any:
    """Run ``function`` on every replica, and join what it returns, as part of the graph of the model's weights.

    ::

        predicted = on_replicas(lambda replica, share: replica(share.batch), model, batch, [torch.device("cpu")] * 2)
        criterion(predicted, targets).backward()  # into the model's own gradients

    The first replica is the model itself, so what it changes (buffers, attributes) stays; the others are copies. They
    run in order, so the random numbers are the same in every run, and metrics are updated in the order of the samples.

    Args:
        function: called with each replica and its share of the batch.
        model: on the first device.
        batch: to be divided.
        devices: one for each replica. One device may be named several times.

    Raises:
        ValueError: the batch can't be divided, the model can't be replicated, or the outputs can't be joined.
        BaseException: from ``function``, with a note that names the replica.
    """
    shares = scatter(batch, devices)
    replicas = replicate(model, [share.device for share in shares])
    outputs = []
    with _metrics_take_all_devices(model):
        for number, (replica, share) in enumerate(zip(replicas, shares, strict=True)):
            try:
                with torch.cuda.device(share.device) if share.device.type == "cuda" else nullcontext():
                    outputs.append(function(replica, share))
            except BaseException as error:
                error.add_note(f"This was raised in replica {number} of {len(shares)}, on {share.device}.")
                raise
    return joined(outputs, [share.samples for share in shares], devices[0])


@contextmanager
def _metrics_take_all_devices(model: nn.Module) -> Iterator[None]:
    """Inside, torchmetrics' objects, which all replicas share, bring the arguments of updates to their device."""

    def update(metric: Metric, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor.to(metric.device))
        return own(*args, **kwargs)

    metrics = {module: module.update for module in model.modules() if isinstance(module, Metric)}
    for metric, own in metrics.items():
        vars(metric)["update"] = partial(update, metric, own)
    try:
        yield
    finally:
        for metric, own in metrics.items():
            vars(metric)["update"] = own
