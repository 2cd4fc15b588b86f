"""Data parallelism in one process: replicas of a model run one after the other, as one autograd graph.

A batch is divided into shares, each replica of the model runs on its share, and the outputs are joined into what the
model would have returned for the whole batch. GPUs compute at the same time, since a replica only launches its kernels.

The first replica is the model itself. The others are shallow copies, as torch.nn.parallel.replicate makes them on GPUs,
with every attribute of the user's objects. On the model's own device they compute with its parameters themselves, on
another one with copies from which gradients flow back. Metrics aren't copied: updates of copies would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from lightning_parallel.batch import batch_size, mapped, split
from lightning_parallel.batch_joins import join_outputs
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.modules import buffers_of, is_compiled, modules_of, parameters_of, shallow_copy
from lightning_parallel.values import same_value


class Share(NamedTuple):
    """What one replica gets of a batch: the part on the replica's device, its number of samples, and the device."""

    batch: Any
    samples: int
    device: torch.device


def on_replicas(
    function: Callable[[Any, Share], Any], model: nn.Module, batch: Any, devices: Sequence[torch.device]
) -> Any:
    """Run ``function`` on every replica, and join what it returns, as part of the graph of the model's weights.

    ::

        predicted = on_replicas(lambda replica, share: replica(share.batch), model, batch, [torch.device("cpu")] * 2)
        criterion(predicted, targets).backward()  # into the model's own gradients

    Replicas run in order, so the random numbers are the same in every run, and metrics are updated in the order of the
    samples. What the first one changes (buffers, attributes) stays.

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
                    output = function(replica, share)
            except BaseException as error:
                error.add_note(f"This was raised in replica {number} of {len(shares)}, on {share.device}.")
                raise
            outputs.append(mapped(output, partial(Tensor.to, device=devices[0])))
    return join_outputs(outputs, [share.samples for share in shares], strict=True)


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


def replicate(model: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """The model itself, which is on the first device, and a replica of it for each of the others.

    Raises:
        ValueError: a part of the model can't be copied: it is scripted or compiled, or has parameters without a shape.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'The model'} is scripted, and can't be replicated: use the unscripted module.")
        if is_compiled(module):
            raise ValueError(
                f"{name or 'The model'} is compiled, and can't be replicated in one process: leave torch.compile out, "
                f"or use strategy='ddp'."
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: run the model on a batch before, for example in setup().")
    return [model, *(_replica(model, device, {}) for device in devices[1:])]


def _replica(held: Any, device: torch.device, made: dict[Any, Any]) -> Any:
    """What stands in a replica for a module, a parameter or a buffer. ``made`` has it for those that are registered in
    several places."""
    if held is None or isinstance(held, Metric | MetricCollection):
        return held
    if held not in made:
        if isinstance(held, nn.Module):
            copy = made[held] = shallow_copy(held)
            for name, child in modules_of(held).items():
                modules_of(copy)[name] = _replica(child, device, made)
            for name, parameter in parameters_of(held).items():
                own = _replica(parameter, device, made)
                setattr(copy, name, own)  # recurrent layers keep a list of theirs
                parameters_of(copy)[name] = vars(copy).pop(name, own)
            for name, buffer in buffers_of(held).items():
                buffers_of(copy)[name] = _replica(buffer, device, made)
        elif isinstance(held, nn.Parameter):
            made[held] = held.to(device)
            vars(made[held]).update(vars(held))
        else:
            made[held] = held.to(device, copy=True)
    return made[held]


def set_apart(model: nn.Module, replica: nn.Module) -> Iterator[str]:
    """The names of buffers, and of attributes that are numbers or tensors, of which the model and a replica have made
    different values. They were equal when the replica was made."""
    for (path, own), copy in zip(model.named_modules(), replica.modules(), strict=True):
        others = vars(copy) | buffers_of(copy)
        for name, value in (vars(own) | buffers_of(own)).items():
            if isinstance(value, Tensor | int | float) and not same_value(value, others.get(name)):
                yield f"{path}.{name}" if path else name


@contextmanager
def _metrics_take_all_devices(model: nn.Module) -> Iterator[None]:
    """Inside, torchmetrics' objects, which all replicas share, bring the arguments of updates to their device."""

    def update(metric: Metric, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped((args, kwargs), lambda tensor: tensor.to(metric.device))
        return own(*args, **kwargs)

    with ExitStack() as put_back:
        for metric in model.modules():
            if isinstance(metric, Metric):
                put_back.callback(replaced(metric, "update", partial(update, metric, metric.update)))
        yield
