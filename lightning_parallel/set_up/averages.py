"""Averages of weights where ranks hold parts of them: each rank averages its part, and nothing is sent in a step.

Lightning's callback copies the whole module, and walks over the parameters of the copy and of the module side by side.
Averages are elementwise, so this rank's part is enough::

    the callback            one process                     here
    setup                   copies the module               gets an empty module, as long as the module is whole
    after a step            averages all                    averages this rank's part, once the rank has made the step
    validation, the end     swaps all, or copies all back   swaps or copies this rank's part
    a checkpoint            saves two states of the model   saves this rank's part of both
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.checkpoint.rank_states import named_tensors
from lightning_parallel.checkpoint.trainer_checkpoints import Average
from lightning_parallel.private.lightning.averaging import (
    are_known_functions,
    copy_of_module,
    device_of_averages,
    walks,
)
from lightning_parallel.private.lightning.launching import callbacks_of
from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.modules import buffers_of, parameters_of
from lightning_parallel.ranks.collectives import together
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.ranks.run import Run


class _Averages(nn.Module):
    """Stands for a copy of the module: it has a copy of what this rank holds, as plain tensors, under the names and in
    the order of the module. It is empty until :meth:`_fill` is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # The module's children go beside these, by names such as "source". A reference isn't copied with a callback.
        self._averaged = weakref.ref(module)
        self._held: dict[str, Tensor] = {}  # by the names of what this rank saves
        self._dtypes = {name: each.dtype for name, each in named_tensors(module).items()}  # the run may convert it

    def _fill(self, module: nn.Module, local: LocalModel, device: torch.device) -> None:
        """Copy what is here to the ``device``."""
        copies: dict[int, Any] = {id(module): self}  # what is tied is copied once
        saved = nn.Module.state_dict(module, keep_vars=True)

        def copy_of(name: str, tensor: Tensor) -> Any:
            if id(tensor) not in copies:
                values = local_part(tensor)
                copy = values.to(device, self._dtypes.get(name, values.dtype), copy=True)
                copies[id(tensor)] = nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy
            return copies[id(tensor)]

        for path, part in module.named_modules(remove_duplicate=False):
            copy, prefix = copies.setdefault(id(part), nn.Module()), path and f"{path}."
            if path:
                parent, _, last = path.rpartition(".")
                self.get_submodule(parent).add_module(last, copy)
            for key, parameter in _here(parameters_of(part)):
                copy.register_parameter(key, copy_of(prefix + key, parameter))
            for key, buffer in _here(buffers_of(part)):
                copy.register_buffer(key, copy_of(prefix + key, buffer), persistent=prefix + key in saved)
        self._held = {name: copies[id(each)] for name, each in {**local.parameters, **local.buffers()}.items()}


def _here(tensors: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, AbsentTensor):
            yield key, tensor


def leave_out_copies(callbacks: Iterable[Callback], until: ExitStack) -> None:
    """From now on, until the stack is closed, a callback that averages weights gets no copy of the module in its
    ``setup``. Call it before."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            until.callback(replaced(callback, "setup", partial(_without_copy, callback.setup)))


def _without_copy(setup: Callable[..., None], trainer: pl.Trainer, module: Any, stage: str) -> None:
    module.__deepcopy__ = lambda memo: _Averages(module)  # copy.deepcopy looks at the object
    try:
        with trainer.strategy.tensor_init_context():  # it calls configure_model
            setup(trainer, module, stage)
    finally:
        del module.__deepcopy__


def take_part(
    run: Run,
    local: LocalModel,
    strategy: str,
    after_update: Callable[[], list[Callable[[], Any]] | None],
    until: ExitStack,
) -> Average | None:
    """Give a callback that averages weights this rank's part to average, until the stack is closed. All ranks call it,
    once the module is divided and its parts are equal where they have to be.

    Args:
        strategy: the name of its class, for messages.
        after_update: returns what this rank calls after the last update that Lightning has counted; None if the update
            is made.

    Returns:
        What it averages; None if there is no such callback, or it averages nothing yet.

    Raises:
        ValueError: on every rank, if averages of parts would be others than those of one process.
    """
    found = [callback for callback in callbacks_of(run.trainer) if isinstance(callback, WeightAveraging)]
    if not found or (averages := copy_of_module(found[0])) is None:  # it has trained nothing
        return None
    callback = found[0]
    together(None, lambda: _refuse(found, averages, run, local, strategy))
    assert isinstance(averages, _Averages)
    if not averages._held:
        averages._fill(run.module, local, device_of_averages(callback, run.device))
    for owner, name in walks(callback):
        waits_for = after_update if name == "update_parameters" else lambda: None  # at others nothing is in flight
        until.callback(replaced(owner, name, partial(_walk, getattr(owner, name), run.module, waits_for)))
    return Average(averages, averages._held)


def _walk(
    function: Callable[..., Any],
    module: pl.LightningModule,
    after_update: Callable[[], list[Callable[[], Any]] | None],
    *args: Any,
) -> None:
    """Walk over what this rank holds of the module, as plain tensors in the module's memory: now, or, where this rank
    makes the update later, after it, with the buffers of now."""
    following = after_update()
    buffers = [local_part(each) for each in module.buffers() if not isinstance(each, AbsentTensor)]
    if following is not None:
        buffers = [each.clone() for each in buffers]
    part = SimpleNamespace(
        parameters=lambda: (local_part(each) for each in module.parameters() if not isinstance(each, AbsentTensor)),
        buffers=lambda: iter(buffers),
    )
    walk = partial(function, *(part if each is module else each for each in args))
    if following is None:
        walk()
    else:
        following.append(walk)


def _refuse(found: Sequence[WeightAveraging], averages: nn.Module, run: Run, local: LocalModel, strategy: str) -> None:
    name = type(found[0]).__name__
    if len(found) > 1:
        raise ValueError(f"{name} and {type(found[1]).__name__}: under {strategy} one callback averages weights.")
    if not isinstance(averages, _Averages) or averages._averaged() is not run.module:
        raise ValueError(
            f"{name} has averages of another module, or of another Trainer's run. Use a new Trainer and {name}."
        )
    in_parts = run.layout.stages > 1 or bool(local.shards) or local.is_fully_sharded
    if run.trains and in_parts and not are_known_functions(found[0]):
        raise ValueError(
            f"{name} under {strategy}: it averages with a function of your own, and a rank has a part of the "
            f"parameters, on which that may give other values. Use torch.optim.swa_utils.get_ema_avg_fn(decay), leave "
            f"the function out for equal weights, or use strategy='ddp'."
        )
