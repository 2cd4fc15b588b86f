"""Checks that a checkpoint is of this model, in the same words for a directory and for a plain file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lightning_parallel.checkpoint.agreement import first_few


def differences(model: Mapping[str, Tensor], found: Mapping[str, Sequence[int]], *, strict: bool) -> list[str]:
    """The tensors that a rank doesn't find in a checkpoint, or finds in another shape, in words.

    Args:
        model: the tensors held here, by their names in the whole model.
        strict: every tensor in ``model`` must be in the checkpoint.
    """
    problems = []
    for name, tensor in model.items():
        shape = found.get(name)
        if shape is None:
            problems += [f"{name} is missing in it"] if strict else []
        elif tuple(shape) != tuple(tensor.shape):
            problems.append(f"{name} has shape {tuple(shape)} in it and {tuple(tensor.shape)} in the model")
    return problems


def unknown(names: Iterable[str], held: Iterable[str]) -> list[str]:
    """The tensors in a checkpoint that no rank's model has, in words."""
    known = set(held)
    return [f"{name} is in no rank's model" for name in names if name not in known]


def refuse(path: str | os.PathLike[str], problems: Sequence[str]) -> None:
    """Refuse a checkpoint if there are problems.

    Raises:
        ValueError: it names some of them.
    """
    if problems:
        raise ValueError(
            f"The checkpoint {os.fspath(path)} does not fit the model: {first_few(dict.fromkeys(problems))}."
        )
