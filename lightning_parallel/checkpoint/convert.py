"""Converts a checkpoint from one kind to another: a directory, a plain ``.ckpt``, or safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint import directory, format, plain
from lightning_parallel.checkpoint.directory import PathLike
from lightning_parallel.checkpoint.keys import OptimizerState
from lightning_parallel.ranks.layout import Layout


def convert(source: PathLike, target: PathLike, *, save_weights_only: bool = False, weights_only: bool = True) -> None:
    """Write the content of a checkpoint as one of another kind. It takes one process, and memory for all of it.

    ::

        source                   target                what is written
        anything                 *.safetensors         weights
        a directory              another name          a plain ``.ckpt``, as Lightning writes in one process
        a plain file             another name          a directory
        *.safetensors            another name          a directory of weights

    Args:
        source: the path of the checkpoint. Its name and its content say of which kind it is.
        target: the path to write to. A file or a checkpoint that is there is replaced.
        save_weights_only: write the weights only.
        weights_only: refuse a source that holds more than tensors and plain containers: unpickling other objects can
            run code. Turn it off for files that you trust.

    Raises:
        ValueError: the source is missing or damaged; it is a file whose optimizer states can't be given names; or the
            target is a folder of something else.
    """
    source, target = Path(source), Path(target)
    weights = save_weights_only or plain.SAFETENSORS in (source.suffix, target.suffix)
    if weights:
        content: dict[str, Any] = {"state_dict": plain.read_full(source, weights_only)}
    else:
        content = plain.read_plain(source, weights_only)
    tensors, aliases, extra_state = _each_once(content["state_dict"])
    if target.suffix == plain.SAFETENSORS:
        if extra_state:
            raise ValueError(f"{next(iter(extra_state))} in {source} is no tensor, and safetensors hold nothing else.")
        with directory.replacing(target) as new:
            plain.write_safetensors(new, tensors, aliases)
    elif source.is_file():
        left_out = (*plain.OF_TENSORS, plain.OPTIMIZER_NAMES)
        format.save(
            target,
            model=tensors,
            optimizers=_named(source, content, aliases),
            trainer={key: value for key, value in content.items() if key not in left_out},
            rank_state={},  # those of all replicas are in the trainer's part
            coordinate=Layout.resolve(1).coordinate,
            aliases=aliases,
            extra_state=extra_state,
        )
    else:
        with directory.replacing(target) as new:
            torch.save(content, new)


def _each_once(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """The tensors under their first names, the first name of each further one, and the entries that aren't tensors."""
    first: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    others = {name: each for name, each in state_dict.items() if not isinstance(each, Tensor)}
    for name, tensor in ((name, each) for name, each in state_dict.items() if name not in others):
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        held = first.setdefault(same, name)
        if held == name:
            tensors[name] = tensor
        else:
            aliases[name] = held
    return tensors, aliases, others


def _named(source: Path, content: Mapping[str, Any], aliases: Mapping[str, str]) -> list[OptimizerState]:
    """The states of a plain checkpoint's optimizers, by parameter name."""
    states = content.get("optimizer_states", [])
    names = content.get(plain.OPTIMIZER_NAMES) or [
        [group.get("param_names", []) for group in state["param_groups"]] for state in states
    ]
    if not all(any(groups) for groups in names):
        raise ValueError(
            f"{source} has numbers for its optimizer's parameters, and no names: it was written without the callback "
            f"ExactResume. Pass it as ckpt_path, every strategy reads it as it is; or convert the weights only "
            f"(save_weights_only=True)."
        )
    return plain.by_name(states, [[[aliases.get(name, name) for name in group] for group in each] for each in names])
