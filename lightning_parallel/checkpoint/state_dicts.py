"""What a module brings into a checkpoint where ranks hold parts of it: its ``state_dict()`` and its hyperparameters.

Each rank saves the tensors that it holds, under the module's names. A ``state_dict()`` of the user's, or
``on_save_checkpoint``, may leave some out, and add others.

``save_hyperparameters()`` keeps a network or a metric among the arguments as the very object that is trained. While a
Trainer runs, each rank has a part of it, which can't be pickled. But Lightning also keeps a copy of the arguments, made
when they were given. A checkpoint gets this copy; what the network has learned is in its ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.private.torch import tree_leaves
from lightning_parallel.ranks.local_model import memory_of


def refuse_others(state_dict: Mapping[str, Any], module: pl.LightningModule, what: str) -> None:
    """Refuse a ``state_dict`` that has other values for the module's tensors, or these tensors under other names.

    Args:
        what: what has made it, for the message.

    Raises:
        ValueError: it names the entry.
    """
    own = named_tensors(module)
    for name, value in state_dict.items():
        if not (_is_same(own[name], value) if name in own else _is_more(module, name, value, own)):
            raise ValueError(
                f"{what}[{name!r}]: each rank saves the tensors that it holds, under the names of the module. Save "
                f"other values under a key of their own in the checkpoint, in on_save_checkpoint."
            )


def extra_state(module: nn.Module) -> dict[str, Any]:
    """The entries of ``state_dict`` that aren't parameters or buffers, such as what ``get_extra_state`` returns."""
    tensors = named_tensors(module)
    return {n: value for n, value in nn.Module.state_dict(module, keep_vars=True).items() if n not in tensors}


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


def _is_same(own: Tensor, value: Any) -> bool:
    """Is a value in a ``state_dict`` the module's tensor?"""
    if not isinstance(value, Tensor) or value.shape != own.shape or value.dtype != own.dtype:
        return False
    return isinstance(own, AbsentTensor) or memory_of(own) == memory_of(value)


def _is_more(module: nn.Module, name: str, value: Any, own: Mapping[str, Tensor]) -> bool:
    """Is a value extra state of a submodule, and none of the module's tensors under another name?"""
    if not isinstance(value, Tensor):
        return True
    if isinstance(value, AbsentTensor) or _owner(module, name) is None:
        return False
    memory = memory_of(value)
    return memory == 0 or all(memory_of(tensor) != memory for tensor in own.values())


def save_as_given(checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
    """Replace hyperparameters in a checkpoint that hold modules, also in lists and dictionaries, by Lightning's copies
    of them."""
    for owner in (module, getattr(module.trainer, "datamodule", None)):
        held = checkpoint.get(getattr(owner, "CHECKPOINT_HYPER_PARAMS_KEY", ""))
        if not isinstance(held, dict):  # none, or a container of OmegaConf, which holds no modules
            continue
        names = [key for key, value in held.items() if any(isinstance(x, nn.Module) for x in tree_leaves(value))]
        given = owner.hparams_initial if names else {}  # type: ignore[union-attr]  # Lightning copies at each access
        held.update({name: given[name] for name in names if name in given})
