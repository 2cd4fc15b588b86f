"""Reading the two pickled files of a checkpoint that somebody else may have made, without running code in them.

The tensors' own files are safe: torch opens them with `weights_only=True`.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_parallel.agreement import first_few

METADATA = ".metadata"
TRAINER = "trainer.pt"

Found = dict[str, metadata.TensorStorageMetadata]

_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *((metadata.__name__, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
    }
)


class _Unpickler(pickle.Unpickler):
    """For the metadata, which torch would unpickle whatever that calls: only what belongs there may be called."""

    def find_class(self, module: str, name: str) -> Any:
        path = module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if path or dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise ValueError(f"the checkpoint's {METADATA} asks for {module}.{name}: it may be an attack")


class Reader(FileSystemReader):
    """torch's reader of distributed checkpoints, for those that hold tensors and nothing else."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """What is where in the checkpoint.

        Raises:
            ValueError: the file asks for what doesn't belong there, or is damaged.
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
        """The description of each tensor, by its key.

        Raises:
            ValueError: there are other things among the tensors. torch unpickles those as they come.
        """
        entries = self.read_metadata().state_dict_metadata
        tensors = {key: entry for key, entry in entries.items() if isinstance(entry, metadata.TensorStorageMetadata)}
        if len(tensors) < len(entries):
            others = first_few(entries.keys() - tensors.keys())
            raise ValueError(f"{self.path} has objects among its tensors, which could run code: {others}")
        return tensors


def read_trainer(directory: Path, weights_only: bool) -> dict[str, Any]:
    """What trainer.pt holds.

    Raises:
        ValueError: it holds other than tensors and plain containers, which `weights_only` forbids, or is damaged.
    """
    path = directory / TRAINER
    if not zipfile.is_zipfile(path):  # what torch.save writes; torch.load would take anything else for a pickle
        raise _damaged(path)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and plain containers, and loading that can run code. "
            f"If you trust the file, load it with weights_only=False. ({str(error).strip().splitlines()[0]})"
        ) from error
    return state


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged, perhaps cut short when it was copied: load another checkpoint, or copy anew")
