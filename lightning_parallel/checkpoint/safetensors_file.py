"""Weights as a file of safetensors, the format in which models are shared.

It holds each tensor once; the further names of tied ones are in its header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

SUFFIX = ".safetensors"
_ALIASES = "aliases"  # in the header, as JSON


def read(path: Path) -> dict[str, Tensor]:
    """All tensors by name, tied ones under all their names.

    Raises:
        ModuleNotFoundError: the package safetensors is not installed.
        ValueError: the file is missing or damaged.
    """
    library = _library()
    try:
        with library.safe_open(path, "pt") as file:
            aliases = json.loads((file.metadata() or {}).get(_ALIASES, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except FileNotFoundError:
        raise ValueError(f"There is no file {path}.") from None
    except library.SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no file of safetensors: {error}.") from error
    return tensors | {name: tensors[held] for name, held in aliases.items()}


def write(path: Path, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Write tensors, each under one name. ``aliases`` are the further names of tied ones, each with its name in
    ``tensors``.

    Raises:
        ModuleNotFoundError: the package safetensors is not installed.
    """
    _library()
    from safetensors.torch import save_file

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, {"format": "pt", _ALIASES: json.dumps(dict(aliases))})


def _library() -> Any:
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"*{SUFFIX} needs the package safetensors: pip install safetensors.") from error
    return safetensors
