"""Converts a checkpoint into one file: a plain ``.ckpt``, or safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint import directory, plain
from lightning_parallel.checkpoint.directory import PathLike


def convert(source: PathLike, target: PathLike, *, save_weights_only: bool = False, weights_only: bool = True) -> None:
    """Write the content of a checkpoint into one file: weights as safetensors, if the target's name ends so, or else a
    plain ``.ckpt``, as Lightning writes in one process. It takes one process, and memory for all of it. There is no way
    back into a directory: every strategy reads a plain file as it is.

    Args:
        source: a directory, a plain ``.ckpt``, or safetensors.
        target: the path to write to. A file or a checkpoint that is there is replaced.
        save_weights_only: write the weights only.
        weights_only: refuse a source that holds more than tensors and plain containers: unpickling other objects can
            run code. Turn it off for files that you trust.

    Raises:
        ValueError: the source is missing or damaged, or the target is a folder of something else.
    """
    source, target = Path(source), Path(target)
    weights = save_weights_only or plain.SAFETENSORS in (source.suffix, target.suffix)
    if weights:
        content: dict[str, Any] = {"state_dict": plain.read_full(source, weights_only)}
    else:
        content = plain.read_plain(source, weights_only)
    if target.suffix != plain.SAFETENSORS:
        with directory.replacing(target) as new:
            torch.save(content, new)
        return
    others = [name for name, each in content["state_dict"].items() if not isinstance(each, Tensor)]
    if others:
        raise ValueError(f"{others[0]} in {source} is no tensor, and safetensors hold nothing else.")
    tensors, aliases = _each_once(content["state_dict"])
    with directory.replacing(target) as new:
        plain.write_safetensors(new, tensors, aliases)


def _each_once(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors under their first names, and the first name of each further one."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state_dict.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if (held := first.setdefault(same, name)) != name:
            aliases[name] = held
    return {name: tensor for name, tensor in state_dict.items() if name not in aliases}, aliases
