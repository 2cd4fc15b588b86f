"""Reading the two pickled files of a checkpoint that somebody else may have made, without running code in them.

The files of the tensors are safe: torch opens them with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_parallel.checkpoint.agreement import first_few
from lightning_parallel.torch_private import METADATA_CLASSES

METADATA = ".metadata"
TRAINER = "trainer.pt"

Found = dict[str, metadata.TensorStorageMetadata]  # each tensor's shape and dtype, by its key


class _Unpickler(pickle.Unpickler):
    """For the metadata, which torch unpickles without a check. Only the classes that belong in it are allowed here."""

    def find_class(self, module: str, name: str) -> Any:
        path = module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if path or dtype or (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        raise ValueError(f"The checkpoint's {METADATA} asks for {module}.{name}: it may be an attack.")


class Reader(FileSystemReader):
    """torch's reader of distributed checkpoints, restricted to those that hold tensors and nothing else."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """What is where in the checkpoint.

        Raises:
            ValueError: the file asks for a class that doesn't belong in it, or is damaged.
        """
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as file:
                result = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:  # pickle's list
            raise _damaged(path) from error
        if not isinstance(result, metadata.Metadata):
            raise _damaged(path)
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


def read_trainer(directory: Path, weights_only: bool) -> dict[str, Any]:
    """What trainer.pt holds.

    Args:
        directory: the checkpoint.
        weights_only: refuse anything but tensors and plain containers.

    Raises:
        ValueError: it holds what ``weights_only`` forbids, or is damaged.
    """
    path = directory / TRAINER
    if not zipfile.is_zipfile(path):  # torch.save writes a zip file; torch.load would take anything else for a pickle
        raise _damaged(path)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and plain containers, and loading that can run code. If you trust the "
            f"file, load it with weights_only=False. ({str(error).strip().splitlines()[0]})"
        ) from error
    return state


def _damaged(path: Path) -> ValueError:
    return ValueError(
        f"{path} is damaged, perhaps cut short when it was copied: load another checkpoint, or copy again."
    )
