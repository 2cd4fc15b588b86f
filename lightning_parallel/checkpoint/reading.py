"""Reading a checkpoint's directory, which somebody else may have made, without running code in it.

Two of its files are pickled. The files of tensors are safe: torch opens them with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from lightning_parallel.checkpoint import directory
from lightning_parallel.checkpoint.agreement import first_few
from lightning_parallel.checkpoint.archive import check_archive, damaged
from lightning_parallel.checkpoint.contents import NOT_WRITTEN, verified
from lightning_parallel.checkpoint.directory import FILES, METADATA, TRAINER
from lightning_parallel.torch_private import METADATA_CLASSES

MODEL = "model/"  # how the keys of parameters and buffers begin

Found = dict[str, metadata.TensorStorageMetadata]  # each tensor's shape and dtype, by its key


class _Unpickler(pickle.Unpickler):
    """Reads the metadata, which torch would unpickle without a check. Only classes that belong in it are allowed."""

    def find_class(self, module: str, name: str) -> Any:
        path = module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if path or dtype or (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        raise ValueError(f"The checkpoint's {METADATA} asks for {module}.{name}: it may be an attack.")


class Reader(FileSystemReader):
    """torch's reader of distributed checkpoints, restricted to checkpoints that hold nothing but tensors."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """The metadata: which tensors there are, and where in the files.

        Raises:
            ValueError: the file asks for a class that doesn't belong in it, or is damaged.
        """
        return self._metadata

    @cached_property
    def _metadata(self) -> metadata.Metadata:
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as file:
                result = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:  # pickle's list
            raise damaged(path.parent, path, NOT_WRITTEN) from error
        if not isinstance(result, metadata.Metadata):
            raise damaged(path.parent, path, NOT_WRITTEN)
        return result

    def found(self) -> Found:
        """The shape and dtype of each tensor, by its key.

        Raises:
            ValueError: there are objects among the tensors, which torch would unpickle without a check.
        """
        entries = self.read_metadata().state_dict_metadata
        tensors = {key: entry for key, entry in entries.items() if isinstance(entry, metadata.TensorStorageMetadata)}
        if len(tensors) < len(entries):
            others = first_few(entries.keys() - tensors.keys())
            raise ValueError(f"{self.path} has objects among its tensors, which could run code: {others}.")
        return tensors


def open_directory(path: Path) -> tuple[Reader, Found, dict[str, Any]]:
    """The reader, the shape and dtype of each tensor by its key, and what contents.json says.

    Raises:
        ValueError: there is no checkpoint, or it is damaged.
    """
    source = directory.find(path)
    missing = [name for name in FILES if not (path / name).is_file()]
    if source is None and len(missing) < len(FILES):
        raise damaged(path, path / missing[0], "it is missing")
    if source is None:
        raise ValueError(f"There is no checkpoint at {path}: it would be a directory with {' and '.join(FILES)}.")
    contents, wrong = verified(source)  # first: it has a checksum of the metadata
    if wrong is not None:
        raise damaged(source, *wrong)
    reader = Reader(source)
    return reader, reader.found(), contents


def empty(found: Found, key: str) -> Tensor:
    """A tensor on the CPU to read a whole one into."""
    return torch.empty(found[key].size, dtype=found[key].properties.dtype)


def check_tensors(reader: Reader, tensors: dict[str, Tensor]) -> None:
    """Compare the files that :func:`read_tensors` would read with their checksums.

    Raises:
        ValueError: a file is missing or damaged.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    stored = reader.read_metadata()
    planner.set_up_planner(tensors, stored)
    for index in {item.storage_index for item in planner.create_local_plan().items}:
        place = stored.storage_data[index]
        file = Path(reader.path) / place.relative_path
        check_archive(Path(reader.path), file, place.offset, place.length)


def read_tensors(reader: Reader, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, or a rank's shards of them, by their keys."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # no_dist: each rank knows from the metadata what it needs, so there is nothing to agree on.
    with plain_errors("read", Path(reader.path)):
        load_tensors(tensors, storage_reader=reader, planner=planner, no_dist=True)


@contextmanager
def plain_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn torch's CheckpointException, a BaseException that clean-up code doesn't expect, into a RuntimeError. It says
    how much room the disk has, since torch's own words for a full disk are about positions in a file. ``verb`` says
    what is done to the tensors at ``path``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            reasons = [f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items()]
            room = f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free on its disk"
            raise RuntimeError(f"Cannot {verb} the tensors of {path} ({room}): {first_few(reasons)}.") from error


def read_trainer(folder: Path, weights_only: bool) -> dict[str, Any]:
    """The content of trainer.pt in a checkpoint's ``folder``. With ``weights_only``, anything but tensors and plain
    containers is refused.

    Raises:
        ValueError: it holds what ``weights_only`` forbids, or is damaged.
    """
    state = read_file(folder, folder / TRAINER, weights_only)
    if not state.keys() >= {"trainer", "optimizer_scalars", "param_groups"}:
        raise damaged(folder, folder / TRAINER, "it is another file")
    return _with_numbered_optimizers(state)


def read_file(checkpoint: Path, file: Path, weights_only: bool) -> dict[str, Any]:
    """The content of a file that ``torch.save`` has written, which is the checkpoint or belongs to it. Tensors are on
    the CPU. With ``weights_only``, anything but tensors and plain containers is refused.

    Raises:
        ValueError: it holds what ``weights_only`` forbids, or is damaged.
    """
    check_archive(checkpoint, file)  # torch.load would take what is no archive for a pickle
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors and plain containers, and loading that can run code. If you trust the "
            f"file, load it with weights_only=False. ({str(error).strip().splitlines()[0]})"
        ) from error
    if not isinstance(state, dict):
        raise damaged(checkpoint, file, f"it holds a {type(state).__name__}, not a dictionary")
    return state


def _with_numbered_optimizers(state: dict[str, Any]) -> dict[str, Any]:
    """The content of trainer.pt. If it is from before there could be several optimizers, it is brought into today's
    form."""
    if not isinstance(state["optimizer_scalars"], dict):
        return state
    present = bool(state["param_groups"])
    return {
        **state,
        "optimizer_scalars": [state["optimizer_scalars"]] * present,
        "param_groups": [state["param_groups"]] * present,
        "own_options": {place: [options] * present for place, options in state.get("own_options", {}).items()},
    }
