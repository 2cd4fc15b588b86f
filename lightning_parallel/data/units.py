"""Which parts of a model are sharded as one: gathered before they run, freed after.

A *unit* is a module whose parameters are gathered together by its ``forward`` (ZeRO-3, Rajbhandari et al. 2020; PyTorch
FSDP, Zhao et al. 2023): between units a rank holds its share only, inside one the whole unit. What lies in no unit
belongs to the root, which is gathered for the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.partition import find_layers, resolve_layers


def find_units(module: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The units of a model, by name.

    A module that shares a parameter with one elsewhere (tied weights) is none: the parameter would be freed with one of
    them and missing in the other. It is left to the root.

    Args:
        module: the whole model.
        patterns: names of the modules that are units, ``*`` standing for one part of a dotted name. ``None``: the
            layers that a pipeline would be cut between, or no units if the model has no such chain.

    Raises:
        ValueError: a pattern that matches nothing, or a unit inside another.
    """
    names = find_layers(module) if patterns is None else resolve_layers(module, patterns, 1, "units")
    return untied(module, names)


def untied(module: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Those of the named modules that hold parameters, and share none with another part of ``module``."""
    uses = _uses(module)
    units = {}
    for name in names:
        unit = module.get_submodule(name)
        inside = _uses(unit)
        if inside and all(uses[key] == count for key, count in inside.items()):
            units[name] = unit
    return units


def _uses(module: nn.Module) -> Counter[int]:
    """In how many places of a module each of its parameters is."""
    return Counter(
        id(parameter)
        for part in module.modules()
        for _, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
    )


def check_dtypes(name: str, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a unit whose trainable parameters have several dtypes: their gradients travel as one message."""
    found = sorted({str(parameter.dtype) for parameter in parameters if parameter.requires_grad})
    if len(found) > 1:
        what = f"The unit '{name}'" if name else "What lies in no unit"
        raise ValueError(
            f"{what} has trainable parameters of the dtypes {', '.join(found)}, but what is sharded together needs to "
            f"have one: convert them, or name finer `units`, each of one dtype."
        )


def materialize(name: str, module: nn.Module, device: torch.device) -> None:
    """Give parameters and buffers on the meta device memory, and have their modules initialise them. Tied ones stay so.

    Raises:
        ValueError: a module that holds some has no ``reset_parameters()``.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id isn't given to another
    for path, part in module.named_modules(prefix=name):
        own = (*part.named_parameters(recurse=False, remove_duplicate=False), *part.named_buffers(recurse=False))
        absent = {short: tensor for short, tensor in own if tensor.is_meta}
        if not absent:
            continue
        initialise = getattr(part, "reset_parameters", None)
        if not callable(initialise):
            raise ValueError(
                f"'{path}' ({type(part).__name__}) was built on the meta device, as all that configure_model() makes "
                f"is, and holds {', '.join(absent)}, but has no reset_parameters() to give them values. Add one, or "
                f"build it in __init__, in memory."
            )
        for short, tensor in absent.items():
            if id(tensor) not in made:
                empty = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = (tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
            setattr(part, short, made[id(tensor)][1])
        with torch.no_grad():
            initialise()
