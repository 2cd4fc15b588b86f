"""Makes a whole module absent: for good, on the stages that don't run it, or for the trace of a step
(``tracing/dry_run.py``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.absent.origins import METRIC_STATE, origin_of_parameter
from lightning_parallel.absent.tensor import AbsentTensor, absent_like
from lightning_parallel.private.torch.modules import buffers_of, parameters_of
from lightning_parallel.values import changed


def make_absent(module: nn.Module, name: str, device: torch.device, kept: Collection[int] = ()) -> None:
    """Replace every parameter and buffer of ``module`` by an absent one. The memory is freed with its last user.

    Args:
        module: the module, with all its submodules.
        name: the module's name, with which origins begin.
        device: the device that the absent tensors report.
        kept: the ids of tensors that stay as they are; by default none.
    """
    for prefix, submodule in module.named_modules(prefix=name):
        for key, tensor in [*parameters_of(submodule).items(), *buffers_of(submodule).items()]:
            if tensor is not None and id(tensor) not in kept and not isinstance(tensor, AbsentTensor):
                absent = absent_like(tensor, origin_of_parameter(f"{prefix}.{key}" if prefix else key), device)
                setattr(submodule, key, absent)  # not into the dictionaries: an RNN keeps a second list of its weights


@contextmanager
def everything_absent(module: nn.Module, units: Iterable[nn.Module]) -> Iterator[dict[str, AbsentTensor]]:
    """Inside, all parameters are absent, and the buffers of units: their forwards may write to them. So are the states
    of units' metrics. A buffer that a forward sets to a tensor with values has it afterwards, as an attribute would:
    other code may read it.

    Yields:
        The absent tensors, by their first names; states of metrics are left out.
    """
    in_units = {id(part) for unit in units for part in unit.modules()}
    changes: list[tuple[dict[str, Any], str, AbsentTensor]] = []
    made: dict[int, AbsentTensor] = {}  # a parameter with two names is one tensor
    named: dict[AbsentTensor, str] = {}  # by identity
    of_buffers: set[int] = set()  # the ids of their dictionaries

    def replace(store: dict[str, Any], key: str, origin: str) -> AbsentTensor:
        tensor = store[key]
        if isinstance(tensor, AbsentTensor):  # as another stage's is
            return tensor
        # A model on the meta device, which can be planned, is traced with batches that lie on the CPU.
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        changes.append((store, key, made.setdefault(id(tensor), absent_like(tensor, origin, device))))
        return changes[-1][2]

    for prefix, part in module.named_modules():
        in_unit = id(part) in in_units
        stores: list[dict[str, Any]] = [parameters_of(part), buffers_of(part) if in_unit else {}]
        of_buffers.add(id(buffers_of(part)))
        for store in stores:
            for key in [key for key, tensor in store.items() if tensor is not None]:
                name = f"{prefix}.{key}" if prefix else key
                named.setdefault(replace(store, key, origin_of_parameter(name)), name)
        for key, state in part.metric_state.items() if in_unit and isinstance(part, Metric) else ():
            if isinstance(state, Tensor):
                replace(vars(part), key, METRIC_STATE)
    with changed(changes):
        yield {name: absent for absent, name in named.items()}
        now = ((store, key, store.get(key)) for store, key, _ in changes if id(store) in of_buffers)
        given = [each for each in now if isinstance(each[2], Tensor) and not isinstance(each[2], AbsentTensor)]
    for store, key, tensor in given:
        store[key] = tensor
