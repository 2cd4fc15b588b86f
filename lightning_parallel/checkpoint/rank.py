"""What one rank writes into a checkpoint, and how it is filled from one: its tensors under the whole model's names.

A trainer's state is one dictionary, equal on all ranks. Its ``state_dict`` and ``optimizer_states`` are replaced by
this rank's tensors, which go into the directory of :mod:`lightning_parallel.checkpoint.format`. A plain ``.ckpt`` file
of a single process can be loaded too; each rank takes its part of it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.checkpoint import format as format_
from lightning_parallel.checkpoint.agreement import differences, refuse
from lightning_parallel.checkpoint.directory import PathLike
from lightning_parallel.checkpoint.keys import OptimizerState
from lightning_parallel.checkpoint.plain import OF_TENSORS
from lightning_parallel.checkpoint.random_state import RANDOM_STATE, random_state
from lightning_parallel.checkpoint.slices import Slices, empty_like, fill, on_host
from lightning_parallel.private.torch import tree_map
from lightning_parallel.ranks.collectives import together
from lightning_parallel.ranks.local_model import LocalModel, memory_of


class RankCheckpoint:
    """Saves and loads what one rank holds.

    Args:
        group_names: for each optimizer and each of its parameter groups, the whole model's names in it, in order.
        coordinate: this rank's place in the layout.
        written_options: the options that an optimizer writes itself. They may differ between ranks, so each rank's are
            saved. Loading a checkpoint adds to this set.
    """

    def __init__(
        self,
        local: LocalModel,
        group_names: Sequence[Sequence[Sequence[str]]],
        coordinate: str,
        written_options: set[str],
    ) -> None:
        self._parameters, self._shards, self._names = local.parameters, local.shards, local.names
        tensors = {**{name: p.data for name, p in local.parameters.items()}, **local.buffers()}
        self._model = {n: Slices(t, self._shards[n]) if n in self._shards else t for n, t in tensors.items()}
        self._group_names = group_names
        self._coordinate = coordinate
        self._written_options = written_options

    # -- save ----------------------------------------------------------------------------------------------------

    def writer(
        self,
        checkpoint: Mapping[str, Any],
        optimizers: Sequence[Optimizer],
        aliases: Mapping[str, str],
        extra_state: Mapping[str, Any],
        *,
        copied: bool = False,
        file: Callable[[dict[str, Any]], None] | None = None,
    ) -> Callable[..., None]:
        """A function that writes the directory: :func:`lightning_parallel.checkpoint.save`, all but its ``path`` and
        ``group``.

        Args:
            checkpoint: the trainer's state, as Lightning's ``dump_checkpoint`` makes it. What a hook has taken out of
                its ``state_dict`` isn't saved.
            optimizers: the optimizers whose state is saved, unless ``checkpoint`` has no optimizer states.
            aliases: the further names of tied tensors, with the name that each is saved under.
            copied: copy the state to host memory now, so that later changes of it aren't written.
            file: see :func:`lightning_parallel.checkpoint.save`.
        """
        model = {name: tensor for name, tensor in self._model.items() if name in checkpoint["state_dict"]}
        trainer = {key: value for key, value in checkpoint.items() if key not in OF_TENSORS}
        with_optimizers = "optimizer_states" in checkpoint
        states = [self._optimizer_state(optimizer) for optimizer in optimizers] if with_optimizers else []
        return partial(
            format_.save,
            model={name: on_host(tensor) for name, tensor in model.items()} if copied else model,
            optimizers=[_on_host(state) for state in states] if copied else states,
            trainer=written_and_read(trainer) if copied else trainer,
            rank_state=random_state(),
            coordinate=self._coordinate,
            own_options=set(self._written_options),
            order=[name for groups in self._group_names for names in groups for name in names],
            aliases=aliases,
            extra_state=written_and_read(dict(extra_state)) if copied else extra_state,
            file=file,
        )

    def _optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        names = self._names
        state = {
            names[id(p)]: self._placed(names[id(p)], values) for p, values in optimizer.state.items() if id(p) in names
        }
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in optimizer.param_groups
        ]
        return OptimizerState(state, groups)

    def _placed(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's optimizer state. That of a shard is marked with its place in the whole."""
        if name not in self._shards:
            return dict(values)
        placed = {}
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == self._parameters[name].shape:
                value = Slices(value, self._shards[name])
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise ValueError(
                    f"The optimizer keeps {key!r} of shape {tuple(value.shape)} for '{name}', of which each rank holds "
                    f"a shard of shape {tuple(self._parameters[name].shape)}: how to divide it is not known. Use an "
                    f"optimizer whose state has its parameters' shapes, or ModelCheckpoint(save_weights_only=True)."
                )
            placed[key] = value
        return placed

    # -- load ----------------------------------------------------------------------------------------------------

    def load(
        self, path: PathLike, optimizers: Sequence[Optimizer], weights_only: bool, strict: bool = True
    ) -> dict[str, Any]:
        """Fill this rank's tensors and its optimizers from a directory. A collective over all ranks.

        Args:
            path: the directory, written under any layout.
            optimizers: the optimizers to fill; empty where nothing is trained.
            weights_only: see :func:`lightning_parallel.checkpoint.load`.
            strict: see there.

        Returns:
            The trainer's state, with empty ``optimizer_states``. Its ``state_dict`` holds what modules keep besides
            parameters and buffers. Under :data:`.RANDOM_STATE` it has the state of this rank's generators; if the
            layout has changed, that of another rank of the same replica.
        """
        loaded = format_.load(
            path,
            model=self._model,
            parameters=list(self._parameters) if optimizers else [],
            coordinate=self._coordinate,
            strict=strict,
            weights_only=weights_only,
        )
        if optimizers and loaded.optimizers:
            _check_count(path, len(loaded.optimizers), len(optimizers))
            for optimizer, saved in zip(optimizers, loaded.optimizers, strict=True):
                self._fill_optimizer(optimizer, saved.state, saved.param_groups)
            self._written_options |= loaded.own_options
        rest = {"state_dict": dict(loaded.extra_state), "optimizer_states": [], RANDOM_STATE: loaded.rank_state}
        return {**loaded.trainer, **rest}

    def take(
        self,
        loaded: Mapping[str, Any],
        path: PathLike,
        optimizers: Sequence[Optimizer],
        names: Collection[str],
        strict: bool = True,
    ) -> dict[str, Any]:
        """Fill this rank's tensors and its optimizers from a plain checkpoint of a single process. A collective over
        all ranks.

        Args:
            loaded: the content of the file. In its ``state_dict``, what a hook has put there of this rank's own tensors
                stays as it is.
            path: names the file in errors.
            optimizers: the optimizers to fill; empty where nothing is trained.
            names: all names in the whole model's ``state_dict``.
            strict: see :func:`lightning_parallel.checkpoint.load`.

        Raises:
            ValueError: on every rank, before anything has changed, if the file is of another model, or has another
                number of optimizers.
        """
        states = loaded.get("optimizer_states") or []
        tensors = {name: tensor for name, tensor in loaded["state_dict"].items() if isinstance(tensor, Tensor)}
        own = {name for name, tensor in self._model.items() if name in tensors and _share(tensor, tensors[name])}
        model = {name: tensor for name, tensor in self._model.items() if name not in own}
        problems = differences(model, {name: tensor.shape for name, tensor in tensors.items()}, strict=strict)
        together(None, lambda: refuse(path, problems, loaded["state_dict"] if strict else (), names))
        if optimizers and states:
            _check_count(path, len(states), len(optimizers))
        with torch.no_grad():
            for name in model.keys() & tensors.keys():
                fill(model[name], tensors[name])
        if optimizers and states:
            for optimizer, groups, saved in zip(optimizers, self._group_names, states, strict=True):
                # States are numbered through an optimizer's groups, in the order of `group_names`.
                flat = [name for group in groups for name in group]
                state = {flat[index]: self._taken(flat[index], values) for index, values in saved["state"].items()}
                self._fill_optimizer(optimizer, state, saved["param_groups"])
        return {**loaded, "state_dict": {}, "optimizer_states": []}

    def _taken(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a parameter's optimizer state."""
        taken, like = dict(values), self._model.get(name)
        for key, value in values.items():
            if isinstance(like, Slices | DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
                made = empty_like(like, value.dtype)
                fill(made, value)
                taken[key] = made.local if isinstance(made, Slices) else made
        return taken

    def _fill_optimizer(
        self, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        if len(groups) != len(optimizer.param_groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(groups)} parameter groups, but configure_optimizers made "
                f"{len(optimizer.param_groups)}. A callback that adds groups during training, such as BaseFinetuning, "
                f"can't do so before the checkpoint is read. Give configure_optimizers all parameters, frozen ones "
                f"too, and let the callback unfreeze them."
            )
        held = [self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
        numbers = iter(range(len(held)))
        pairs = zip(groups, optimizer.param_groups, strict=True)
        packed = [{**saved, "params": [next(numbers) for _ in group["params"]]} for saved, group in pairs]
        states = {i: dict(state[name]) for i, name in enumerate(held) if name is not None and name in state}
        optimizer.load_state_dict({"state": states, "param_groups": packed})


def written_and_read(trainer: dict[str, Any]) -> dict[str, Any]:
    """A copy as writing and reading it would give: it shares nothing, and lies on the CPU. ``deepcopy`` refuses tensors
    with a graph."""
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    copy: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)  # of this process
    return copy


def _share(tensor: Tensor, other: Tensor) -> bool:
    """Is one the other, or a view of it?"""
    memory = memory_of(tensor.local if isinstance(tensor, Slices) else tensor)
    return memory != 0 and memory == memory_of(other)


def _on_host(optimizer: OptimizerState) -> OptimizerState:
    def copied(value: Any) -> Any:
        return on_host(value) if isinstance(value, Tensor) else deepcopy(value)

    return OptimizerState(tree_map(copied, optimizer.state), tree_map(copied, optimizer.param_groups))


def _check_count(path: PathLike, saved: int, made: int) -> None:
    if saved != made:
        raise ValueError(
            f"The checkpoint {os.fspath(path)} has the state of {saved} optimizer{'s' * (saved != 1)}, but "
            f"configure_optimizers made {made}: return the same ones, in the same order."
        )
