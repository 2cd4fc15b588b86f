"""Saves and loads a run's checkpoints for the Trainer: each rank's part of them, under the whole model's names.

A trainer's state is one dictionary, equal on all ranks. Its ``state_dict`` and ``optimizer_states`` are replaced by
this rank's tensors, which go into the directory of :mod:`lightning_parallel.checkpoint.format`. A plain file of a
single process can be loaded too; each rank takes its part of it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.checkpoint import directory, format
from lightning_parallel.checkpoint.background import BackgroundSave
from lightning_parallel.checkpoint.keys import MODEL, SECOND, OptimizerState, below, divided
from lightning_parallel.checkpoint.plain import OF_TENSORS, WEIGHTS, PlainOnDemand, Wholes, by_name
from lightning_parallel.checkpoint.rank_states import (
    fill_optimizer,
    is_here,
    named_tensors,
    optimizer_state,
    refuse_other_groups,
    refuse_others,
    refuse_parts,
    save_as_given,
)
from lightning_parallel.checkpoint.reading import Reader
from lightning_parallel.checkpoint.slices import Slices, on_host, with_values
from lightning_parallel.ranks.collectives import decided_by_first, together
from lightning_parallel.ranks.local_model import LocalModel, local_part, memory_of
from lightning_parallel.seeding import random_state

RANDOM_STATE = "random_state"  # in a checkpoint that was read: this rank's generators


class Average(NamedTuple):
    """What a callback averages on this rank. In a checkpoint the averages are the model, the weights a second state.

    Attributes:
        module: holds the averages, under the model's names.
        tensors: the averages, by the names of what this rank saves, as plain tensors.
    """

    module: nn.Module
    tensors: Mapping[str, Tensor]


@dataclass(eq=False)
class Checkpoints:
    """Saves and loads a run's state. A checkpoint is a directory that all ranks write, or a file.

    Args:
        coordinate: this rank's place in the layout.
        group_names: for each optimizer and each of its parameter groups, the whole model's names in it, in order.
            :func:`.take_groups` fills it. A later run that only evaluates still saves by it.
        owned: divided parameters that an optimizer steps as a whole on the rank that owns it; is it this one?
        background: runs saves while training goes on; None: training waits for them.
        as_lightning: where every rank holds all of the model, writes the file that Lightning has collected; None: a
            checkpoint is a directory.
        have_failed: an error has ended the run, and a save would need every rank: nothing is saved any more.
        opened: the path of the checkpoint that is loaded, for errors.
        average: what a callback of the run averages here.
    """

    local: LocalModel
    coordinate: str
    group_names: list[list[list[str]]]
    owned: Mapping[str, bool]
    background: BackgroundSave | None
    as_lightning: CheckpointIO | None = None
    have_failed: bool = False
    opened: str | Path = ""
    average: Average | None = None

    def finish(self) -> None:
        """Wait for a save in the background: :meth:`.BackgroundSave.finish`."""
        if self.background is not None:
            self.background.finish()

    def remove(self, path: str | Path, io: CheckpointIO) -> None:
        """Delete a checkpoint, a directory or a file, once the newer one is whole. One rank calls it."""

        def remove() -> None:
            if directory.is_checkpoint(path):
                directory.remove(path)
            else:
                io.remove_checkpoint(path)

        if self.background is None:
            remove()
        else:
            self.background.after(remove)

    @property
    def _averaged(self) -> dict[str, Tensor]:
        """The averages here, as a checkpoint takes them, by name."""
        held = {} if self.average is None else self.average.tensors
        return {name: with_values(each, held[name]) for name, each in self._model.items() if name in held}

    @property
    def _model(self) -> dict[str, Tensor]:
        """The tensors here that belong in a checkpoint, by name."""
        tensors = {**{name: p.data for name, p in self.local.parameters.items()}, **self.local.buffers()}
        shards = self.local.shards
        return {name: Slices(each, shards[name]) if name in shards else each for name, each in tensors.items()}

    # -- save ----------------------------------------------------------------------------------------------------

    def state_dict(self, module: pl.LightningModule) -> dict[str, Any]:
        """The module's ``state_dict()``, checked by :func:`.refuse_others`. Tensors of other ranks are absent."""
        state_dict = module.state_dict()
        if self.as_lightning is None:
            refuse_others(state_dict, module, f"{type(module).__name__}.state_dict()")
        return state_dict

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        storage_options: Any | None,
    ) -> None:
        """Write a directory with every rank's part, or a file. All ranks call it.

        During training it may be written in the background.
        """
        if self.have_failed:
            rank_zero_warn(f"Not saved after an error: {path}. A checkpoint needs every rank.")
            return
        if storage_options is not None and self.as_lightning is None:
            raise TypeError(
                f"storage_options={storage_options!r}: this strategy's checkpoint is a local directory. Leave them "
                f"out, and copy it when it is there, or `convert` it to one file."
            )
        state = module.trainer.state
        trains = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        background = self.background if trains else None
        failed: RuntimeError | None = None
        try:
            self.finish()  # one copy in memory at a time
        except RuntimeError as error:
            failed, background = error, None  # this one is written before the run ends
        copied = background is not None
        write = together(None, lambda: self._writer(checkpoint, path, module, optimizers, storage_options, copied))
        if background is None:
            try:
                write(group=None)
            finally:
                if failed is not None:
                    raise failed
            return
        background.start(str(path), lambda group: write(group=group))

    def _writer(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        storage_options: Any | None,
        copied: bool,
    ) -> Callable[..., None]:
        """A function that writes the checkpoint with the ranks of a ``group``.

        Args:
            checkpoint: the trainer's state, as Lightning's ``dump_checkpoint`` makes it. What a hook has taken out of
                its ``state_dict`` isn't saved.
            optimizers: the optimizers whose state is saved, unless ``checkpoint`` has no optimizer states.
            copied: copy the state to host memory now, so that later changes of it aren't written.
        """
        save_as_given(checkpoint, module)
        if self.as_lightning is not None:
            if not module.trainer.is_global_zero:
                # After an error this rank is alone, and would be taken for the first.
                return partial(decided_by_first, decide=lambda: None)
            content = _written_and_read(checkpoint) if copied else checkpoint
            first = partial(self.as_lightning.save_checkpoint, content, path, storage_options)
            return partial(decided_by_first, decide=first)
        state_dict, model, second = self._states(checkpoint, module)
        own = named_tensors(module)
        extra = {name: value for name, value in state_dict.items() if name not in own and is_here(module, name)}
        of_tensors = OF_TENSORS if self.average is None else (*OF_TENSORS, WEIGHTS)
        trainer = {key: value for key, value in checkpoint.items() if key not in of_tensors}
        refuse_parts(trainer, self.local)
        saved = optimizers if "optimizer_states" in checkpoint else []
        states = [optimizer_state(optimizer, self.local, self.owned) for optimizer in saved]
        if copied:
            trainer, extra = _written_and_read((trainer, extra))
            model, second, parts = on_host((model, second, [(each.state, each.param_groups) for each in states]))
            states = [OptimizerState(*part) for part in parts]
        return partial(
            format.save,
            path,
            model=model,
            optimizers=states,
            trainer=trainer,
            rank_state=random_state(),
            coordinate=self.coordinate,
            order=[name for groups in self.group_names for names in groups for name in names],
            aliases=self.local.tied_names(module),
            extra_state=extra,
            second=second,
        )

    def _states(
        self, checkpoint: Mapping[str, Any], module: pl.LightningModule
    ) -> tuple[Mapping[str, Any], dict[str, Tensor], dict[str, Tensor]]:
        """The module's own ``state_dict`` in a checkpoint that is to be saved; of the tensors that are here those to be
        saved as the model, and those of a second state."""
        given, what = checkpoint["state_dict"], "on_save_checkpoint sets checkpoint['state_dict']"
        weights = None if self.average is None else checkpoint.get(WEIGHTS)
        own = given if weights is None else weights
        refuse_others(own, module, what)
        tied = self.local.tied_names(module)  # any name that is left keeps the tensor
        in_own = {tied.get(name, name) for name in own}
        model = {name: tensor for name, tensor in self._model.items() if name in in_own}
        if self.average is None or weights is None:
            return own, model, {}
        refuse_others(given, self.average.module, what)
        kept = {tied.get(name, name) for name in given}
        averaged = {name: tensor for name, tensor in self._averaged.items() if name in kept and name in model}
        return own, averaged, model

    # -- load ----------------------------------------------------------------------------------------------------

    def load(self, path: str | Path, weights_only: bool | None, io: CheckpointIO) -> dict[str, Any]:
        """Open a directory that was written under any layout, or a plain file. All ranks call it.

        Returns:
            The content, as in one process, for ``on_load_checkpoint``. Then :meth:`take` reads this rank's part of it.

        Raises:
            ValueError: on every rank, if the checkpoint is damaged.
        """
        self.finish()
        self.opened, safe = path, weights_only is not False
        if is_directory(path):
            return together(None, lambda: PlainOnDemand(path, safe))
        return together(None, lambda: io.load_checkpoint(path, weights_only=safe))

    def take(self, content: dict[str, Any], module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Fill this rank's tensors and its optimizers (none where nothing is trained) from what :meth:`load` has
        returned. All ranks call it.

        The content loses its tensors, and gets the state of this rank's generators under :data:`RANDOM_STATE`; if the
        layout has changed, that of another rank of the same replica. A callback that averages weights finds there what
        is filled already.

        Raises:
            ValueError: on every rank, before anything has changed, if the checkpoint is damaged, of another model, or
                has another number of optimizers.
        """
        model, average = self._model, self.average

        def source() -> tuple[Reader | Wholes, dict[str, Any]]:
            if isinstance(content, PlainOnDemand):
                if not content.is_touched:
                    refuse_other_groups(self.opened, content.saved["param_groups"], optimizers)
                    return content.reader, content.saved
                content.complete()
            return self._wholes(content, model, module, optimizers)

        found, saved = together(None, source)
        names = self.local.parameters if optimizers else ()
        # Of an optimizer that steps a parameter as a whole, its owner alone has the state, and all of it.
        trained = {n: None if n in self.owned else model[n] for n in names if self.owned.get(n, True)}
        has_averages = average is not None and bool(below(SECOND, found.found))
        first, second = (self._averaged, model) if has_averages else (model, None)
        strict = module.strict_loading
        states, random = format.load(
            found, saved, self.opened, first, trained, self.coordinate, second=second, strict=strict
        )
        module.load_state_dict(saved["extra_state"], strict=False)
        for optimizer, state in zip(optimizers, states, strict=False):
            fill_optimizer(optimizer, state, self.local)
        content |= {"state_dict": {}, "optimizer_states": [], RANDOM_STATE: random}
        if average is not None:
            averages, weights = average.module.state_dict(), module.state_dict()
            if has_averages:
                content |= {"state_dict": averages, WEIGHTS: weights}
            else:  # they begin with the weights
                content["state_dict"] = {name: local_part(weights[name]) for name in averages if name in weights}

    def _wholes(
        self,
        content: Mapping[str, Any],
        model: Mapping[str, Tensor],
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
    ) -> tuple[Wholes, dict[str, Any]]:
        """A plain checkpoint's tensors, and the rest as a directory's trainer.pt has it. What a hook has put there of
        this rank's own tensors stays as it is."""
        state_dict, tied = content["state_dict"], self.local.tied_names(module)
        others = nn.Module.state_dict(module, keep_vars=True).keys() - named_tensors(module).keys()
        extra = {name: each for name, each in state_dict.items() if name in others or not isinstance(each, Tensor)}
        tensors = {tied.get(name, name): each for name, each in state_dict.items() if name not in extra}
        own = {name: model[name] for name, each in tensors.items() if name in model and _share(model[name], each)}
        numbered = content.get("optimizer_states") or [] if optimizers else []
        refuse_other_groups(self.opened, [state["param_groups"] for state in numbered], optimizers)
        # States are numbered through an optimizer's groups, in the order of `group_names`.
        states = by_name(numbered, self.group_names) if numbered else []
        of_optimizers, scalars = divided([each.state for each in states])
        saved = {
            "trainer": content,
            "optimizer_scalars": scalars,
            "param_groups": [each.param_groups for each in states],
            "extra_state": extra,
        }
        found = of_optimizers | {MODEL + name: each for name, each in (tensors | own).items()}
        if self.average is not None and (second := content.get(WEIGHTS)) is not None:
            found |= {SECOND + tied.get(name, name): each for name, each in second.items() if name not in extra}
        return Wholes(found), saved


def is_directory(path: str | Path) -> bool:
    """Is a checkpoint a directory? The first rank looks, for all ranks, and checks that a file is as it was written: on
    a shared file system others may not see it yet. All ranks call it.

    Raises:
        ValueError: the file is damaged.
    """

    def look() -> bool:
        if directory.is_checkpoint(path) or Path(path).is_dir():
            return True
        if Path(path).is_file():  # a CheckpointIO of the user's may know other places
            directory.check_archive(Path(path), Path(path))
        return False

    return decided_by_first(None, look)


def refuse_writer(io: CheckpointIO) -> None:
    """Refuse a plugin that saves checkpoints its own way: a directory is written by all ranks together."""
    if type(io).save_checkpoint is not TorchCheckpointIO.save_checkpoint:
        raise ValueError(
            f"plugins=[{type(io).__name__}(...)] would save nothing: where ranks hold parts of the model, they write a "
            f"directory together. Leave it out. The strategy's async_save=True saves while training goes on."
        )


def _written_and_read(values: Any) -> Any:
    """A copy as writing and reading it would give: it shares nothing, and lies on the CPU. ``deepcopy`` refuses tensors
    with a graph."""
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)  # of this process


def _share(tensor: Tensor, other: Tensor) -> bool:
    """Is one the other, or a view of it?"""
    memory = memory_of(tensor.local if isinstance(tensor, Slices) else tensor)
    return memory != 0 and memory == memory_of(other)
