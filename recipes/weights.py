"""Weights in one file: of a checkpoint of any kind, or safetensors, the format in which models are shared.

Safetensors have each tensor once. The further names of tied ones are in the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_parallel.checkpoint import read_full, read_plain
from lightning_parallel.checkpoint.directory import replacing

SAFETENSORS = ".safetensors"


def read(path: Path, weights_only: bool = True) -> dict[str, Tensor]:
    """A whole model's state dict, as :func:`read_full` reads it, also of a file of safetensors."""
    if path.suffix != SAFETENSORS:
        return read_full(path, weights_only)
    try:
        with safe_open(path, "pt") as file:
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dictionary)
    except FileNotFoundError:
        raise ValueError(f"There is no file {path}.") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no file of safetensors: {error}.") from error
    return tensors | {name: tensors[held] for name, held in aliases.items()}


def convert(source: Path, target: Path, *, save_weights_only: bool = False, weights_only: bool = True) -> None:
    """Write the content of a checkpoint into one file: weights as safetensors, if the target's name ends so, or else a
    plain ``.ckpt``, as Lightning writes in one process. There is no way back into a directory: every strategy reads a
    plain file as it is.

    Args:
        source: a directory, a plain ``.ckpt``, or safetensors.
        target: the path to write to. A file or a checkpoint that is there is replaced.
        save_weights_only: write the weights only.
        weights_only: refuse a source that holds more than tensors and plain containers: unpickling other objects can
            run code.

    Raises:
        ValueError: the source is missing or damaged, or the target is a folder of something else.
    """
    if save_weights_only or SAFETENSORS in (source.suffix, target.suffix):
        content: dict[str, Any] = {"state_dict": read(source, weights_only)}
    else:
        content = read_plain(source, weights_only)
    if target.suffix == SAFETENSORS:
        others = [name for name, each in content["state_dict"].items() if not isinstance(each, Tensor)]
        if others:
            raise ValueError(f"{others[0]} in {source} is no tensor, and safetensors hold nothing else.")
    with replacing(target) as new:
        if target.suffix == SAFETENSORS:
            _write(new, content["state_dict"])
        else:
            torch.save(content, new)


def _write(path: Path, state_dict: Mapping[str, Tensor]) -> None:
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state_dict.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if (held := first.setdefault(same, name)) != name:
            aliases[name] = held
    tensors = {name: tensor.contiguous() for name, tensor in state_dict.items() if name not in aliases}
    save_file(tensors, path, {"format": "pt", "aliases": json.dumps(aliases)})
