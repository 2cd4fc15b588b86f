"""A model is made in files, so that no process has to hold the whole of it in memory.

Under pipelines and tensor parallelism a rank keeps a part of the model. Which part is known only once the model is
there, with the values that one process would give it. So every rank really makes all of it, but its large tensors lie
in files that are mapped into memory::

    made       torch.empty(n) -> | mapped file |   drawn, filled, copied, viewed, tied as usual
    meanwhile                    | mapped file |   every 64 MiB, what memory holds of the files is dropped
    divided                      | mapped file |   other ranks' tensors are freed, and their files with them
    loaded                       | memory      |   what is left, at the same addresses

Nothing else changes: these are plain tensors on the CPU, whose addresses stay. What isn't seen here lies in memory, as
always: tensors that are made in other threads, by NumPy or by other libraries.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_parallel.torch_private import TorchDispatchMode, tree_leaves

LARGE = 2**20  # bytes of a tensor that is put into a file
KEPT = 2**26  # bytes that are read or written until memory is dropped
_AT_A_TIME = 2**20  # bytes that are loaded

# Linux: <sys/mman.h>
_READ_AND_WRITE, _SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _DONT_NEED = 3, 0x01, 0x02, 0x10, 0x20, 4
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")  # file systems
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # operators' results

Mapped = ctypes.Array  # the bytes of a mapped file, which is unmapped when nothing refers to them


class DiskOffload(TorchDispatchMode):
    """Inside, new tensors of :data:`LARGE` bytes lie in files. It may be entered several times.

    Args:
        folder: of the files. They have no names, and end with their tensors. By default ``TMPDIR``, or ``/var/tmp``.
            Where it isn't on a disk, or the disk is full, a warning says so, and tensors lie in memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self._folder = Path(folder or os.environ.get("TMPDIR") or "/var/tmp")
        self._mapped: list[weakref.ref[Mapped]] = []
        self._touched = 0  # bytes of large tensors, since memory was last dropped
        self._has_failed = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.drop()

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        result = operator(*arguments, **(named or {}))
        if self._has_failed:
            return result
        given = {_address(tensor): tensor.nbytes for tensor in tree_leaves((arguments, named)) if _is_large(tensor)}
        made: dict[int, torch.UntypedStorage] = {}  # by address: results may share memory
        is_unwritten = operator.overloadpacket.__name__ in _UNWRITTEN
        for tensor in tree_leaves(result):
            if not _is_large(tensor) or _address(tensor) in given:  # it was given, or is a view of what was
                continue
            address = _address(tensor)
            if address not in made:
                made[address] = self._in_file(tensor.untyped_storage(), is_unwritten=is_unwritten)
            tensor.set_(made[address], tensor.storage_offset(), tensor.shape, tensor.stride())
        self._touched += sum(given.values())
        self._touched += 0 if is_unwritten else sum(storage.nbytes() for storage in made.values())
        if self._touched > KEPT:
            self.drop()
        return result

    def drop(self) -> None:
        """Free the memory that files take. Their contents stay in the files, and come back when they are read."""
        for mapped in self._alive():
            _checked(_libc().madvise(_place(mapped), ctypes.sizeof(mapped), _DONT_NEED))
        self._touched = 0

    def load(self) -> None:
        """Bring into memory what is left of the tensors. Their files end."""
        if self._alive():
            gc.collect()  # replaced modules refer to themselves
        for mapped in self._alive():
            _load(mapped)
        self._mapped = []

    def _alive(self) -> list[Mapped]:
        """The files that tensors still lie in. Those that are returned stay as long as somebody has the list."""
        alive = [mapped for mapped in (reference() for reference in self._mapped) if mapped is not None]
        self._mapped = [weakref.ref(mapped) for mapped in alive]
        return alive

    def _in_file(self, storage: torch.UntypedStorage, *, is_unwritten: bool) -> torch.UntypedStorage:
        """A storage in a file, with the same contents; the storage itself if that can't be."""
        try:
            if not _is_on_disk(self._folder):
                raise OSError(f"{self._folder} is not on a disk")
            mapped = _map_file(self._folder, storage.nbytes())
        except OSError as error:
            self._has_failed = True
            rank_zero_warn(
                f"The model is made in memory, the whole of it on every rank, instead of in files: {error}. Set TMPDIR "
                f"to a folder on a disk with room for one model a rank."
            )
            return storage
        self._mapped.append(weakref.ref(mapped))
        in_file = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()  # it keeps `mapped` alive
        if not is_unwritten:
            in_file.copy_(storage)
        return in_file


def _is_large(value: Any) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu" and value.layout is torch.strided
    return plain and not value.is_quantized and value.untyped_storage().nbytes() >= LARGE


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# -- files in memory -------------------------------------------------------------------------------------------------


def _is_on_disk(folder: Path) -> bool:
    """Does the folder keep its files elsewhere than in memory?"""
    if sys.platform != "linux":
        return False
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    kinds = dict(mounts)  # the last one that was mounted at a place
    above = (str(place) for place in (folder.resolve(), *folder.resolve().parents))
    return next((kinds[place] for place in above if place in kinds), "tmpfs") not in _IN_MEMORY


def _map_file(folder: Path, size: int) -> Mapped:
    """A new file without a name, mapped.

    Raises:
        OSError: there is no room for it, or no such folder.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        # Without this a full disk would be told by a signal, when the memory is written to.
        os.posix_fallocate(file.fileno(), 0, size)
        place = _libc().mmap(None, size, _READ_AND_WRITE, _SHARED, file.fileno(), 0)
    _checked(place)
    mapped = (ctypes.c_ubyte * size).from_address(place)
    weakref.finalize(mapped, _libc().munmap, place, size).atexit = False
    return mapped


def _load(mapped: Mapped) -> None:
    """Put memory in the place of a file, with its contents."""
    for begin in range(0, ctypes.sizeof(mapped), _AT_A_TIME):
        place, size = _place(mapped) + begin, min(_AT_A_TIME, ctypes.sizeof(mapped) - begin)
        contents = ctypes.string_at(place, size)
        _checked(_libc().mmap(place, size, _READ_AND_WRITE, _PRIVATE | _ANONYMOUS | _FIXED, -1, 0))
        ctypes.memmove(place, contents, size)


def _place(mapped: Mapped) -> int:
    return ctypes.addressof(mapped)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_ssize_t
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _checked(result: int) -> None:
    """Of a call of the system.

    Raises:
        OSError: it failed.
    """
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
