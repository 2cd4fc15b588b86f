"""Reading a checkpoint's directory, which somebody else may have made, without running code in it.

Two of its files are pickled. The files of tensors are safe: torch opens them with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
from lightning_parallel.checkpoint.directory import FILES, METADATA, TRAINER, PathLike, check_archive, damaged, verified
from lightning_parallel.private.torch.tensors import METADATA_CLASSES
from lightning_parallel.values import first_few


class _Unpickler(pickle.Unpickler):
    """Reads the metadata, which torch would unpickle without a check. Only classes that belong in it are allowed."""

    def find_class(self, module: str, name: str) -> Any:
        path = module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if path or dtype or (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        raise ValueError(f"The checkpoint's {METADATA} asks for {module}.{name}: it may be an attack.")


class Reader(FileSystemReader):
    """torch's reader of distributed checkpoints, restricted to checkpoints that hold nothing but tensors.

    Args:
        path: the checkpoint. What a crash may have left elsewhere is found.

    Attributes:
        contents: what contents.json says.
        found: for each tensor, by its key, one of its shape and dtype on the meta device.

    Raises:
        ValueError: there is no checkpoint; it is damaged; its metadata asks for a class that doesn't belong there; or
            there are objects among the tensors, which torch would unpickle without a check.
    """

    def __init__(self, path: PathLike) -> None:
        path = Path(path)
        source = directory.find(path)
        if source is None:
            missing = [name for name in FILES if not (path / name).is_file()]
            if len(missing) < len(FILES):
                raise damaged(path, path / missing[0], "it is missing")
            raise ValueError(f"There is no checkpoint at {path}: it would be a directory with {' and '.join(FILES)}.")
        super().__init__(source)
        self._folder = source
        self.contents, wrong = verified(source)  # first: it has a checksum of the metadata
        if wrong is not None:
            raise damaged(source, wrong)
        self._metadata = self._unpickled()
        self.found: dict[str, Tensor] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if not isinstance(entry, metadata.TensorStorageMetadata):
                raise ValueError(f"{source} has objects among its tensors, which could run code: {key}.")
            self.found[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def _unpickled(self) -> metadata.Metadata:
        file = self._folder / METADATA
        try:
            with open(file, "rb") as opened:
                result = _Unpickler(opened).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:  # pickle's list
            raise damaged(self._folder, file) from error
        if not isinstance(result, metadata.Metadata):
            raise damaged(self._folder, file)
        return result

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """The metadata: which tensors there are, and where in the files."""
        return self._metadata

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Compare what :meth:`fill` would read with its checksums.

        Raises:
            ValueError: a file is missing or damaged.
        """
        planner = _load_planner()
        planner.set_up_planner(tensors, self._metadata)
        for index in {item.storage_index for item in planner.create_local_plan().items}:
            place = self._metadata.storage_data[index]
            check_archive(self._folder, self._folder / place.relative_path, place.offset, place.length)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, or a rank's shards of them, by their keys."""
        # no_dist: each rank knows from the metadata what it needs, so there is nothing to agree on.
        with plain_errors("read", self._folder):
            load_tensors(tensors, storage_reader=self, planner=_load_planner(), no_dist=True)

    def trainer(self, weights_only: bool) -> dict[str, Any]:
        """The content of trainer.pt, as :func:`read_file` reads it."""
        state = read_file(self._folder, self._folder / TRAINER, weights_only)
        if not state.keys() >= {"trainer", "optimizer_scalars", "param_groups", "extra_state"}:
            raise damaged(self._folder, self._folder / TRAINER, "it is another file")
        return state


def _load_planner() -> DefaultLoadPlanner:
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


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
