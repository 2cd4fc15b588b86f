"""Saves and loads a run's checkpoints for the Trainer, and knows the optimizers' groups by the whole model's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_parallel import checkpoint as format_
from lightning_parallel.checkpoint.background import BackgroundSave
from lightning_parallel.checkpoint.hyperparameters import save_as_given
from lightning_parallel.checkpoint.plain import OF_TENSORS
from lightning_parallel.checkpoint.rank import RankCheckpoint, written_and_read
from lightning_parallel.checkpoint.state_dicts import extra_state, is_here, named_tensors, refuse_others
from lightning_parallel.checkpoint.whole import check_archive
from lightning_parallel.ranks.collectives import Group, decided_by_first, together
from lightning_parallel.ranks.local_model import LocalModel

WriteFile = Callable[[dict[str, Any]], None]


class Checkpoints:
    """Saves and loads a run's state. A checkpoint is a directory that all ranks write, or a file.

    Args:
        coordinate: this rank's place in the layout.
        group_names: for each optimizer and each of its parameter groups, the whole model's names in it.
            :meth:`take_groups` fills it. A later run that only evaluates still saves by it.
        background: runs saves while training goes on; None: training waits for them.
        file: writes one file; None: a checkpoint is a directory.
        as_lightning: every rank holds all of the model, and the file is what Lightning has collected.

    Attributes:
        written_options: the options that an optimizer is known to write itself, which may differ between ranks.
    """

    def __init__(
        self,
        local: LocalModel,
        coordinate: str,
        group_names: list[list[list[str]]],
        background: BackgroundSave | None = None,
        *,
        file: CheckpointIO | None = None,
        as_lightning: bool = False,
    ) -> None:
        self._local = local
        self._coordinate = coordinate
        self._group_names = group_names
        self.written_options: set[str] = set()
        self._background = background
        self._file = file
        self._as_lightning = as_lightning
        self._failed = False

    def take_groups(self, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Note which parameters the optimizers have, and leave them those that are on this rank.
        ``configure_optimizers`` has given them the whole model's.

        Raises:
            ValueError: an optimizer needs the whole model.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        elsewhere = names.keys() - self._local.names.keys()
        self._group_names.clear()
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS needs products over the whole model, of which a rank holds a part only.")
            names_of_groups: list[list[str]] = []
            for group in optimizer.param_groups:
                listed = [self._local.aliases[names[id(p)]] for p in group["params"] if id(p) in names]
                names_of_groups.append(list(dict.fromkeys(listed)))
                group["params"] = [p for p in group["params"] if id(p) not in elsewhere]
            self._group_names.append(names_of_groups)
            for parameter in list(optimizer.state):
                if id(parameter) in elsewhere:
                    del optimizer.state[parameter]

    def fail(self) -> None:
        """Save nothing any more after an error: a save would need every rank."""
        self._failed = True

    @property
    def have_failed(self) -> bool:
        return self._failed

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        storage_options: Any | None,
    ) -> None:
        """Write a directory with every rank's part, or a file. All ranks call it.

        During training it may be written in the background. Its name is taken at once: Lightning checks for such a path
        when it looks for a name, and removes other checkpoints.
        """
        if self._failed:
            rank_zero_warn(f"Not saved after an error: {path}. A checkpoint needs every rank.")
            return
        if storage_options is not None and self._file is None:
            raise TypeError(
                f"storage_options={storage_options!r}: this strategy's checkpoint is a local directory. Set "
                f"checkpoint='file'."
            )
        save_as_given(checkpoint, module.trainer, module)
        file: WriteFile | None = None
        if self._file is not None:
            file = partial(self._file.save_checkpoint, path=path, storage_options=storage_options)
        writer: Callable[..., Callable[..., None]] = partial(self._writer, checkpoint, module, optimizers, file)
        if self._as_lightning and file is not None:
            writer = partial(_lightnings_writer, checkpoint if module.trainer.is_global_zero else {}, file)
        state = module.trainer.state
        trains = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        if self._background is None or not trains:
            self.finish()
            together(None, writer)(path)
            return
        self._background.finish()  # one copy in memory at a time
        write = together(None, partial(writer, copied=True))
        taken = self._take_name(Path(path)) if module.trainer.is_global_zero else False

        def save(group: Group) -> None:
            try:
                write(path, group=group)
            except Exception:
                if taken:
                    _give_back_name(Path(path))
                raise

        self._background.start(str(path), save)

    def state_dict(self, module: pl.LightningModule) -> dict[str, Any]:
        """The module's ``state_dict()``, after a check. Tensors of other ranks are absent or in parts.

        Raises:
            ValueError: it has other names or other values than the module.
        """
        state_dict = module.state_dict()
        if not self._as_lightning:
            refuse_others(state_dict, module, f"{type(module).__name__}.state_dict()")
        return state_dict

    def _writer(
        self,
        checkpoint: Mapping[str, Any],
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        file: WriteFile | None,
        *,
        copied: bool = False,
    ) -> Callable[..., None]:
        state_dict = checkpoint["state_dict"]
        refuse_others(state_dict, module, "on_save_checkpoint sets checkpoint['state_dict']")
        own = named_tensors(module)
        extra = {name: value for name, value in state_dict.items() if name not in own and is_here(module, name)}
        aliases = self._local.tied_names(module)
        return self._part().writer(checkpoint, optimizers, aliases, extra, copied=copied, file=file)

    def _take_name(self, path: Path) -> bool:
        """Make an empty folder or file for the coming checkpoint, if nothing is there."""
        with suppress(OSError):  # the save itself will raise what is wrong
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if self._file is None else path.touch(exist_ok=False)
            return True
        return False

    def load(
        self,
        path: str | Path,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
        weights_only: bool | None,
        io: CheckpointIO,
    ) -> dict[str, Any]:
        """Read this rank's part of a checkpoint: of a directory written under any layout, or of a plain file.

        Returns:
            The trainer's state. For a module with an ``on_load_checkpoint`` it is the whole content, as in one process;
            :meth:`take` then reads what the hook has left of it.
        """
        self.finish()
        safe, asked = weights_only is not False, is_overridden("on_load_checkpoint", module)
        if format_.is_checkpoint(path) or Path(path).is_dir():
            if asked:
                return together(None, lambda: format_.PlainOnDemand(path, safe))
            return self._load_part(path, module, optimizers, safe)
        check_file(path)
        content = io.load_checkpoint(path, weights_only=safe)
        return content if asked else self._take(content, path, module, optimizers)

    def take(self, content: dict[str, Any], module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Read this rank's part of what :meth:`load` has returned, after ``on_load_checkpoint``."""
        if not is_overridden("on_load_checkpoint", module):
            return
        if not isinstance(content, format_.PlainOnDemand):
            loaded = self._take(content, "the checkpoint", module, optimizers)
        elif content.is_touched:
            loaded = self._take(content.whole(), content.path, module, optimizers)
        else:
            loaded = self._load_part(content.path, module, optimizers, content.weights_only)
        content.update({key: value for key, value in loaded.items() if key in OF_TENSORS or key not in content})

    def _load_part(
        self, path: str | Path, module: pl.LightningModule, optimizers: Sequence[Optimizer], safe: bool
    ) -> dict[str, Any]:
        loaded = self._part().load(path, optimizers, safe, module.strict_loading)
        module.load_state_dict(loaded["state_dict"], strict=False)
        return {**loaded, "state_dict": {}}

    def _take(
        self, content: dict[str, Any], path: str | Path, module: pl.LightningModule, optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        names = nn.Module.state_dict(module, keep_vars=True).keys()
        loaded = self._part().take(content, path, optimizers, names, module.strict_loading)
        extra = {name: content["state_dict"][name] for name in extra_state(module) if name in content["state_dict"]}
        module.load_state_dict(extra, strict=False)
        return loaded

    def remove(self, path: str | Path, io: CheckpointIO) -> None:
        """Delete a checkpoint, a directory or a file, once the newer one is whole. One rank calls it."""
        remove = partial(_remove, path, io)
        if self._background is None:
            remove()
        else:
            self._background.after(remove)

    def finish(self) -> None:
        """Wait for a save in the background.

        Raises:
            RuntimeError: it has failed.
        """
        if self._background is not None:
            self._background.finish()

    def _part(self) -> RankCheckpoint:
        return RankCheckpoint(self._local, self._group_names, self._coordinate, self.written_options)


def _lightnings_writer(checkpoint: dict[str, Any], file: WriteFile, *, copied: bool = False) -> Callable[..., None]:
    """As :meth:`.RankCheckpoint.writer`, where the first rank has all there is to write."""
    content = written_and_read(checkpoint) if copied else checkpoint

    def write(path: str | Path, group: Group = None) -> None:
        decided_by_first(group, lambda: file(content))

    return write


def _give_back_name(path: Path) -> None:
    """Delete what was made for a checkpoint that could not be saved, while it is empty."""
    with suppress(OSError):
        if path.is_dir():
            path.rmdir()
        elif path.stat().st_size == 0:
            path.unlink()


def check_file(path: str | Path) -> None:
    """Check that a checkpoint that is a file is as it was written. All ranks call it.

    Raises:
        ValueError: it is damaged.
    """
    if Path(path).is_file():  # a CheckpointIO of the user's may know other places
        decided_by_first(None, lambda: check_archive(Path(path), Path(path)))


def _remove(path: str | Path, io: CheckpointIO) -> None:
    if format_.is_checkpoint(path):
        format_.remove(path)
    else:
        io.remove_checkpoint(path)
