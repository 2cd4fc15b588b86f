"""What a rank brings into a checkpoint: the module's ``state_dict()``, its hyperparameters, the optimizers' states.

Each rank saves what it holds, under the whole model's names. A ``state_dict()`` of the user's, or
``on_save_checkpoint``, may leave tensors out, and add other values.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.checkpoint.keys import OptimizerState
from lightning_parallel.checkpoint.slices import Slices
from lightning_parallel.private.torch.tensors import tree_leaves
from lightning_parallel.ranks.local_model import LocalModel, local_part, memory_of

# -- the module --------------------------------------------------------------------------------------------------


def refuse_others(state_dict: Mapping[str, Any], module: nn.Module, what: str) -> None:
    """Refuse a ``state_dict`` that has other values for the module's tensors, or these tensors under other names.

    Args:
        what: what has made it, for the message.
    """
    own = named_tensors(module)
    memories = {memory_of(tensor) for tensor in own.values()} - {0}
    for name, value in state_dict.items():
        if name in own:
            there = own[name]
            alike = isinstance(value, Tensor) and value.shape == there.shape and value.dtype == there.dtype
            fits = alike and (isinstance(there, AbsentTensor) or memory_of(there) == memory_of(value))
        else:  # extra state of a submodule, and none of the module's tensors under another name
            is_known = not isinstance(value, AbsentTensor) and _owner(module, name) is not None
            fits = not isinstance(value, Tensor) or (is_known and memory_of(value) not in memories)
        if not fits:
            raise ValueError(
                f"{what}[{name!r}]: each rank saves the tensors that it holds, under the names of the module. Save "
                f"other values under a key of their own in the checkpoint, in on_save_checkpoint."
            )


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(buffers)}


def is_here(module: nn.Module, name: str) -> bool:
    """Does this rank hold the submodule that an entry belongs to? A submodule without tensors is on every rank."""
    owner = _owner(module, name)
    tensors = () if owner is None else (*owner.parameters(), *owner.buffers())
    return not tensors or not all(isinstance(tensor, AbsentTensor) for tensor in tensors)


def _owner(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule with an entry of a ``state_dict``; None if the user's ``state_dict()`` has made the name up."""
    try:
        return module.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return None


def save_as_given(checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
    """Replace hyperparameters in a checkpoint that hold modules, also in lists and dictionaries, by Lightning's copies.

    ``save_hyperparameters()`` keeps a network or a metric as the very object that is trained, of which a rank has a
    part, which can't be pickled. Lightning's copy was made when it was given; what it has learned is in the
    ``state_dict``.
    """
    for owner in (module, getattr(module.trainer, "datamodule", None)):
        held = checkpoint.get(getattr(owner, "CHECKPOINT_HYPER_PARAMS_KEY", ""))
        if not isinstance(held, dict):  # none, or a container of OmegaConf, which holds no modules
            continue
        names = [key for key, value in held.items() if any(isinstance(x, nn.Module) for x in tree_leaves(value))]
        given = owner.hparams_initial if names else {}  # type: ignore[union-attr]  # Lightning copies at each access
        held.update({name: given[name] for name in names if name in given})


def refuse_parts(content: Any, local: LocalModel, path: tuple[str, ...] = ()) -> None:
    """Refuse tensors beside the model's state that have the name and the shape of this rank's part of a parameter, as
    averages have that a callback keeps: they would be the first rank's, for all ranks."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            refuse_parts(value, local, (*path, *str(key).split(".")))
    elif isinstance(content, Tensor):
        for name in (".".join(path[begin:]) for begin in range(len(path))):
            part = local.parameters.get(name)
            is_part = name in local.shards or isinstance(part, DTensor)
            if part is not None and is_part and content.shape in (part.shape, local_part(part).shape):
                raise ValueError(
                    f"The checkpoint's {'.'.join(path)!r} is this rank's part of '{name}', or of something alike. Such "
                    f"a value is saved from the first rank only, so the other parts would be lost. Lightning's "
                    f"EMAWeightAveraging and WeightAveraging save all parts; or leave it out of the callback's state."
                )


# -- the optimizers ----------------------------------------------------------------------------------------------


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
            raise ValueError(
                "LBFGS needs products over the whole model, of which a rank holds a part only. Use an optimizer that "
                "treats each parameter by itself, such as AdamW or Muon, or strategy='ddp'."
            )
        group_names.append([])
        known = set[str]()  # names of a tied parameter that is absent here are of several parameters
        for group in optimizer.param_groups:
            listed = [local.aliases[names[id(p)]] for p in group["params"] if id(p) in names]
            group_names[-1].append([name for name in dict.fromkeys(listed) if name not in known])
            known.update(listed)
            group["params"] = [p for p in group["params"] if id(p) not in elsewhere]
        for parameter in list(optimizer.state):
            if id(parameter) in elsewhere:
                del optimizer.state[parameter]
    return group_names


def optimizer_state(optimizer: Optimizer, local: LocalModel, owned: Collection[str] = ()) -> OptimizerState:
    """An optimizer's state by name. That of a shard is marked with its place in the whole, unless it is ``owned``: then
    it is the whole one's.

    Raises:
        ValueError: how to divide a state is not known.
    """
    names = local.names
    held = {names[id(p)]: dict(values) for p, values in optimizer.state.items() if id(p) in names}
    for name in sorted((held.keys() & local.shards.keys()) - set(owned)):
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
    """Refuse a checkpoint that has ``saved`` other optimizers or groups than the run. One of weights has none, and a
    run that trains nothing asks for none."""
    if not saved or not optimizers:
        return
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
