"""The optimizers' part of what a rank saves and loads: the states of its parameters, under the whole model's names."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.checkpoint.keys import OptimizerState
from lightning_parallel.checkpoint.slices import Slices
from lightning_parallel.ranks.local_model import LocalModel


def take_groups(optimizers: Sequence[Optimizer], module: nn.Module, local: LocalModel) -> list[list[list[str]]]:
    """Leave the optimizers the parameters that are on this rank. ``configure_optimizers`` has given them the whole
    model's. Returns the whole model's names, for each optimizer and group.

    Raises:
        ValueError: an optimizer needs the whole model.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    elsewhere = names.keys() - local.names.keys()
    group_names: list[list[list[str]]] = []
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS needs products over the whole model, of which a rank holds a part only.")
        group_names.append([])
        for group in optimizer.param_groups:
            listed = [local.aliases[names[id(p)]] for p in group["params"] if id(p) in names]
            group_names[-1].append(list(dict.fromkeys(listed)))
            group["params"] = [p for p in group["params"] if id(p) not in elsewhere]
        for parameter in list(optimizer.state):
            if id(parameter) in elsewhere:
                del optimizer.state[parameter]
    return group_names


def optimizer_state(optimizer: Optimizer, local: LocalModel) -> OptimizerState:
    """An optimizer's state by name. That of a shard is marked with its place in the whole.

    Raises:
        ValueError: how to divide a state is not known.
    """
    names = local.names
    held = {names[id(p)]: dict(values) for p, values in optimizer.state.items() if id(p) in names}
    for name in held.keys() & local.shards.keys():
        shape = local.parameters[name].shape
        for key, value in held[name].items():
            if isinstance(value, Tensor) and value.shape == shape:
                held[name][key] = Slices(value, local.shards[name])
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise ValueError(
                    f"The optimizer keeps {key!r} of shape {tuple(value.shape)} for '{name}', of which each rank holds "
                    f"a shard of shape {tuple(shape)}: how to divide it is not known. Use an optimizer whose state has "
                    f"its parameters' shapes, or ModelCheckpoint(save_weights_only=True)."
                )
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
        for group in optimizer.param_groups
    ]
    return OptimizerState(held, groups)


def refuse_other_groups(
    path: str | os.PathLike[str], saved: Sequence[Collection[Mapping[str, Any]]], optimizers: Sequence[Optimizer]
) -> None:
    """Refuse a checkpoint that has ``saved`` other optimizers or groups than the run.

    Raises:
        ValueError: it says how many there are.
    """
    if len(saved) != len(optimizers):
        raise ValueError(
            f"The checkpoint {os.fspath(path)} has the state of {len(saved)} optimizer{'s' * (len(saved) != 1)}, but "
            f"configure_optimizers made {len(optimizers)}: return the same ones, in the same order."
        )
    for groups, optimizer in zip(saved, optimizers, strict=True):
        if len(groups) != len(optimizer.param_groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(groups)} parameter groups, but configure_optimizers made "
                f"{len(optimizer.param_groups)}. A callback that adds groups during training, such as BaseFinetuning, "
                f"can't do so before the checkpoint is read. Give configure_optimizers all parameters, frozen ones "
                f"too, and let the callback unfreeze them."
            )


def fill_optimizer(optimizer: Optimizer, saved: OptimizerState, local: LocalModel) -> None:
    """Load a state by name, of as many groups as the optimizer has."""
    held = [local.names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
    numbers = iter(range(len(held)))
    pairs = zip(saved.param_groups, optimizer.param_groups, strict=True)
    packed = [{**options, "params": [next(numbers) for _ in group["params"]]} for options, group in pairs]
    states = {i: dict(saved.state[name]) for i, name in enumerate(held) if name is not None and name in saved.state}
    optimizer.load_state_dict({"state": states, "param_groups": packed})
