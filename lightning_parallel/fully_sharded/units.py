"""The units of fully sharded data parallelism: modules that are gathered before they run, and freed after.

A unit is a module whose parameters are gathered together by its ``forward`` (ZeRO-3, Rajbhandari et al. 2020; PyTorch
FSDP, Zhao et al. 2023). Between units a rank holds only its part of each parameter; inside one, the whole unit. What
lies in no unit belongs to the root, which is gathered for the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.private.torch.tensors import tensors_in


def untied(module: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Those of the named modules inside ``module`` that hold parameters, and share none with another part of it.

    A parameter that two units share (tied weights, or a layer that is in both) would be freed with one of them and
    missing in the other. Such modules are left to the root.
    """
    uses = _uses(module)
    units = {}
    for name in names:
        unit = module.get_submodule(name)
        inside = _uses(unit)
        if inside and all(uses[key] == count for key, count in inside.items()):
            units[name] = unit
    return units


def refuse_second_derivatives(name: str, unit: nn.Module) -> None:
    """Put a hook on a unit that refuses ``create_graph=True``: its parameters are freed when the second derivative
    needs them. ``name`` is for the error."""

    def refuse(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True: there is no second derivative through '{name}', whose parameters are gathered "
                f"only while it runs. Leave it out of `units` (what is in no unit is whole), or use strategy='ddp'."
            )

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(refuse)

    unit.register_forward_hook(watch)


def _uses(module: nn.Module) -> Counter[int]:
    """How often each parameter, and each part that holds parameters, is registered in a module; by id."""
    uses = Counter[int]()
    for part in module.modules():
        uses.update(id(each) for _, each in part.named_parameters(recurse=False, remove_duplicate=False))
        uses.update(id(child) for child in part.children() if any(True for _ in child.parameters()))
    return uses


def check_dtypes(name: str, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a unit whose trainable parameters have several dtypes: their gradients travel as one message. ``name`` is
    empty for what lies in no unit."""
    found = sorted({str(parameter.dtype) for parameter in parameters if parameter.requires_grad})
    if len(found) > 1:
        what = f"The unit '{name}'" if name else "What lies in no unit"
        raise ValueError(
            f"{what} has trainable parameters of the dtypes {', '.join(found)}, but what is sharded together needs to "
            f"have one: convert them, or name finer `units`, each of one dtype."
        )


def materialize(name: str, module: nn.Module, device: torch.device) -> None:
    """Give memory to a module's parameters and buffers on the meta device, and have their modules initialise them. Tied
    ones stay tied. ``name`` is for errors.

    Raises:
        ValueError: a module that holds some has no ``reset_parameters()``.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old tensor, so that its id isn't given to another
    for path, part in module.named_modules(prefix=name):
        own = (*part.named_parameters(recurse=False, remove_duplicate=False), *part.named_buffers(recurse=False))
        empty_ones = {short: tensor for short, tensor in own if tensor.is_meta}
        if not empty_ones:
            continue
        initialise = getattr(part, "reset_parameters", None)
        if not callable(initialise):
            raise ValueError(
                f"'{path}' ({type(part).__name__}) was built on the meta device, so {', '.join(empty_ones)} has no "
                f"values, and it has no reset_parameters() to give it some. Build it in configure_model(), without "
                f"that device: there no rank needs memory for the whole model."
            )
        for short, tensor in empty_ones.items():
            if id(tensor) not in made:
                empty = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = (tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
            setattr(part, short, made[id(tensor)][1])
        with torch.no_grad():
            initialise()
