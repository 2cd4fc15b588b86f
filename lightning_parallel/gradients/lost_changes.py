"""Refuses writes to a copy of a fully sharded parameter or gradient: they would be lost."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.private.torch import base_of, tensors_in
from lightning_parallel.ranks.local_model import local_part, memory_of
from lightning_parallel.values import line_outside

# Names of what writes to its first argument. `__int__`, `__index__` and `__invert__` read; `_amp_` is a loss scaler's.
IN_PLACE = re.compile("__setitem__|__i(?!n).*__|(?!_amp_).*[^_]_")

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def refuse_lost_changes(module: nn.Module, function: Any, args: tuple[Any, ...]) -> None:
    """Refuse a call of a torch function that would change a copy.

    Raises:
        ValueError: it names the line, and the parameter of ``module``.
    """
    copied = _changed_by_copy(function, args)
    if copied is None:
        return
    named = module.named_parameters()
    names = {local_part(t).data_ptr(): n for n, p in named for t in (p, p.grad) if isinstance(t, DTensor)}
    does = "assigns to .data" if function == _SET_DATA else "writes to some rows"
    raise ValueError(
        f"{line_outside(('torch', 'lightning', 'lightning_parallel', 'contextlib'))} {does} of "
        f"'{names.get(local_part(copied).data_ptr())}', which is fully sharded: the change would be lost. Change all "
        f"of it in place, as by `.data.copy_(...)`, or `.mul_(mask)` with a mask that is made by "
        f"torch.distributed.tensor.distribute_tensor(mask, p.device_mesh, p.placements). Or use strategy='ddp'."
    )


def _changed_by_copy(function: Any, args: tuple[Any, ...]) -> DTensor | None:
    """The fully sharded tensor of which a call would change a copy; None if there is none."""
    if function == _SET_DATA:  # a DTensor computes with a tensor of its own, whatever its `.data` is set to
        return args[0] if isinstance(args[0], DTensor) else None
    name = getattr(function, "__name__", "")
    for tensor in tensors_in(args[:1]) if IN_PLACE.fullmatch(name) else ():
        # An assignment by index writes to the view that the index gives. Torch's view of some rows is a copy here.
        written = tensor[args[1]] if name == "__setitem__" and isinstance(tensor, DTensor) else tensor
        base = base_of(written)
        if isinstance(base, DTensor) and memory_of(base) != memory_of(written):
            return base
    return None
