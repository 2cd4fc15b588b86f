"""Between a Lightning checkpoint and the package's format: what a rank holds, by the whole model's names.

Lightning makes one dictionary on every rank. Its ``state_dict`` and optimizer states are replaced by this rank's
tensors, under their original names, and go into the directory of :mod:`lightning_parallel.checkpoint`; the rest, which
is equal on all ranks, is the trainer's own state. A plain ``.ckpt`` file can be read too: each rank takes its part.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_parallel import checkpoint as format_
from lightning_parallel.slices import Slices
from lightning_parallel.tensor.shard import Shard

PathLike = str | Path


class RankCheckpoint:
    """Saves and loads what one rank holds.

    Args:
        model: its parameters and persistent buffers, by original name.
        parameters: those of them that are parameters, and may have optimizer state.
        shards: those of which this rank holds a shard.
        group_names: for each parameter group of the optimizer, the whole model's names in it, in order.
        coordinate: of this rank.
    """

    def __init__(
        self,
        model: Mapping[str, Tensor],
        parameters: Mapping[str, nn.Parameter],
        shards: Mapping[str, Shard],
        group_names: Sequence[Sequence[str]],
        coordinate: str,
    ) -> None:
        self._model = {name: Slices(t, shards[name]) if name in shards else t for name, t in model.items()}
        self._parameters = dict(parameters)
        self._shards = shards
        self._group_names = group_names
        self._coordinate = coordinate

    # -- save ----------------------------------------------------------------------------------------------------

    def save(self, checkpoint: Mapping[str, Any], path: PathLike, optimizers: Sequence[Optimizer]) -> None:
        """A collective over all ranks."""
        trainer = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        with_optimizer = "optimizer_states" in checkpoint and len(optimizers) == 1
        state, groups = self._optimizer_state(optimizers[0]) if with_optimizer else ({}, [])
        format_.save(
            path,
            model=self._model,
            optimizer=state,
            param_groups=groups,
            trainer=trainer,
            rank_state=random_state(),
            coordinate=self._coordinate,
            order=[name for names in self._group_names for name in names],
        )

    def _optimizer_state(self, optimizer: Optimizer) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        state = {
            names[id(p)]: self._placed(names[id(p)], values) for p, values in optimizer.state.items() if id(p) in names
        }
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in optimizer.param_groups
        ]
        return state, groups

    def _placed(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's optimizer state; of a shard's, with its place in the whole."""
        if name not in self._shards:
            return dict(values)
        placed = {}
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == self._parameters[name].shape:
                value = Slices(value, self._shards[name])
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise ValueError(
                    f"The optimizer keeps {key!r} of shape {tuple(value.shape)} for '{name}', of which each rank holds "
                    f"a shard of {tuple(self._parameters[name].shape)}: how to divide it is not known. Use an "
                    f"optimizer whose state has its parameters' shapes, or ModelCheckpoint(save_weights_only=True)."
                )
            placed[key] = value
        return placed

    # -- load ----------------------------------------------------------------------------------------------------

    def load(self, path: PathLike, optimizers: Sequence[Optimizer], weights_only: bool) -> dict[str, Any]:
        """Fill the rank's tensors and its optimizer; return the trainer's own state. A collective over all ranks."""
        loaded = format_.load(
            path,
            model=self._model,
            parameters=list(self._parameters) if optimizers else [],
            coordinate=self._coordinate,
            weights_only=weights_only,
        )
        if optimizers and loaded.param_groups:
            self._fill_optimizer(optimizers[0], loaded.optimizer, loaded.param_groups)
            restore_random_state(loaded.rank_state)
        return {**loaded.trainer, "state_dict": {}, "optimizer_states": []}

    def load_file(
        self, io: CheckpointIO, path: PathLike, optimizers: Sequence[Optimizer], weights_only: bool
    ) -> dict[str, Any]:
        """The same from a plain Lightning checkpoint."""
        loaded: dict[str, Any] = io.load_checkpoint(path, weights_only=weights_only)
        missing = [name for name in self._model if name not in loaded["state_dict"]]
        if missing:
            raise ValueError(
                f"The checkpoint {os.fspath(path)} lacks {len(missing)} tensors of this model, such as {missing[0]!r}."
            )
        with torch.no_grad():
            for name, tensor in self._model.items():
                _fill(tensor, loaded["state_dict"][name])
        states = loaded.get("optimizer_states") or []
        if optimizers and states:
            # Its states are numbered through the groups, as the whole model's parameters are in `group_names`.
            names = [name for group in self._group_names for name in group]
            state = {names[index]: self._taken(names[index], values) for index, values in states[0]["state"].items()}
            self._fill_optimizer(optimizers[0], state, states[0]["param_groups"])
        return {**loaded, "state_dict": {}, "optimizer_states": []}

    def _taken(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's shard of a parameter's optimizer state."""
        shard, parameter = self._shards.get(name), self._parameters.get(name)
        taken = dict(values)
        for key, value in values.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            if shard is not None:
                taken[key] = shard.take(value)
            elif isinstance(parameter, DTensor) and value.shape == parameter.shape:
                taken[key] = _divided(value, parameter)
        return taken

    def _fill_optimizer(
        self, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        if len(groups) != len(optimizer.param_groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(groups)} parameter groups, but configure_optimizers made "
                f"{len(optimizer.param_groups)}. If a callback adds groups while training, as BaseFinetuning does: a "
                f"checkpoint is read before it could. Give configure_optimizers all parameters, frozen ones too, and "
                f"let the callback unfreeze them."
            )
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        held = [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
        packed: list[dict[str, Any]] = []
        index = 0
        for saved, group in zip(groups, optimizer.param_groups, strict=True):
            count = len(group["params"])
            packed.append({**saved, "params": list(range(index, index + count))})
            index += count
        states = {i: dict(state[name]) for i, name in enumerate(held) if name is not None and name in state}
        optimizer.load_state_dict({"state": states, "param_groups": packed})


def _fill(tensor: Tensor, whole: Tensor) -> None:
    if isinstance(tensor, Slices):
        tensor.local.copy_(tensor.shard.take(whole))
    elif isinstance(tensor, DTensor):
        tensor.copy_(_divided(whole, tensor))
    else:
        tensor.copy_(whole)


def _divided(whole: Tensor, like: DTensor) -> DTensor:
    """``whole``, which every rank has, in shards as those of ``like``."""
    whole = whole.to(like.to_local().device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def random_state() -> dict[str, Tensor]:
    """The global generators, as tensors."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(legacy["state"]["pos"]),
    }
    if gauss is not None:
        state["python_gauss"] = torch.tensor(gauss, dtype=torch.float64)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Undo :func:`random_state`. A layout with other coordinates finds nothing, and changes nothing."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, *words = state["python"].tolist()
        gauss = float(state["python_gauss"]) if "python_gauss" in state else None
        random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        key = state["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, int(state["numpy_position"]), 0, 0.0))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
