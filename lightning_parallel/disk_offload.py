"""A model is made in files, so that no process has to hold the whole of it in memory.

Under pipelines and tensor parallelism a rank keeps a part of the model. Which part is known only once the model is
there, with the values that one process would give it. So every rank makes all of it, but large tensors lie in files
that are mapped into memory::

    made       torch.empty(n) -> | mapped file |   drawn, filled, copied, viewed, tied as usual
    meanwhile                    | mapped file |   every 64 MiB, what memory holds of the files is dropped
    divided                      | mapped file |   other ranks' tensors are freed, and their files with them
    loaded                       | memory      |   what is left, at the same addresses

These are plain tensors on the CPU, but their memory can't be resized, and until they are loaded, forked processes share
them. Tensors that other threads, NumPy or other libraries make lie in memory, as always.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_long, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parallel.private.torch.tensors import TorchDispatchMode, is_zero_tensor, makes_memory, tree_leaves

LARGE = 2**20  # bytes of a tensor that is put into a file
KEPT = 2**26  # bytes that are read or written until memory is dropped
_AT_A_TIME = 2**20  # bytes that are loaded

# Linux: <sys/mman.h>
_READ_AND_WRITE, _PRIVATE, _FIXED, _ANONYMOUS, _DONT_NEED = 3, 0x02, 0x10, 0x20, 4
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # operators' results
_MAPPING = ("from_file",)  # operators whose results are files' memory already

Mapped = np.ndarray[Any, np.dtype[np.uint8]]  # a mapped file, which is unmapped when nothing refers to the array


class DiskOffload(TorchDispatchMode):
    """Inside, new tensors of :data:`LARGE` bytes lie in files, in ``TMPDIR`` or else in ``/var/tmp``. They have no
    names, and end with their tensors. If the disk is full, a warning says so, and tensors lie in memory. It may be
    entered several times, and inside itself."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(os.environ.get("TMPDIR") or "/var/tmp")
        self._mapped: list[weakref.ref[Mapped]] = []
        self._touched = 0  # bytes of large tensors, since memory was last dropped
        self._has_failed = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.drop()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mapped": []}  # a copy has other tensors

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
        given = {_address(value): value.nbytes for value in tree_leaves((arguments, named)) if _is_large(value)}
        self._touched += sum(given.values())
        if makes_memory(operator) and operator.overloadpacket.__name__ not in _MAPPING:
            made = [value for value in tree_leaves(result) if _is_large(value) and _address(value) not in given]
            self._put_into_files(made, operator.overloadpacket.__name__ in _UNWRITTEN)
        if self._touched > KEPT:
            self.drop()
        return result

    def _put_into_files(self, tensors: Sequence[Tensor], is_unwritten: bool) -> None:
        in_files = {mapped.ctypes.data for mapped in self._alive()} if tensors else set()
        moved: dict[int, torch.UntypedStorage] = {}  # by address: results may share memory
        for tensor in tensors:
            storage, address = tensor.untyped_storage(), _address(tensor)
            if address in in_files:
                continue  # entered inside itself, this has been here before
            if address not in moved:
                moved[address] = self._in_file(storage, is_unwritten=is_unwritten)
                self._touched += 0 if is_unwritten else storage.nbytes()
            tensor.set_(moved[address], tensor.storage_offset(), tensor.shape, tensor.stride())

    def drop(self) -> None:
        """Free the memory that files take. Their contents stay in the files, and come back when they are read."""
        for mapped in self._alive():  # advice: that of locked memory isn't taken
            _libc().madvise(c_void_p(mapped.ctypes.data), c_size_t(mapped.nbytes), _DONT_NEED)
        self._touched = 0

    def load(self) -> None:
        """Bring into memory what is left of the tensors. Their files end."""
        if self._alive():
            gc.collect()  # replaced modules refer to themselves
            _libc().malloc_trim(0)  # what was freed while tensors were made and divided
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
            if sys.platform != "linux":
                raise OSError("files are mapped under Linux only")
            mapped = _map_file(self._folder, storage.nbytes())
        except (OSError, RuntimeError) as error:  # the latter is torch's
            self._has_failed = True
            warnings.warn(  # on each rank: their disks may differ
                f"The model is made in memory, the whole of it on every rank, instead of in files: {error}. Set TMPDIR "
                f"to a folder on a disk with room for one model a rank.",
                stacklevel=2,
            )
            return storage
        self._mapped.append(weakref.ref(mapped))
        in_file = torch.from_numpy(mapped).untyped_storage()  # it keeps the array alive
        return in_file if is_unwritten else in_file.copy_(storage)


def _is_large(value: Any) -> bool:
    if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    if value.is_quantized or value.is_nested or is_zero_tensor(value):
        return False
    return value.untyped_storage().nbytes() >= LARGE


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# -- files in memory -------------------------------------------------------------------------------------------------


def _map_file(folder: Path, size: int) -> Mapped:
    """A new file without a name, mapped.

    Raises:
        OSError: there is no room for it, or no such folder.
        RuntimeError: it can't be mapped.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        # Without this a full disk would be told by a signal, when the memory is written to.
        os.posix_fallocate(file.fileno(), 0, size)
        name = f"/proc/self/fd/{file.fileno()}"
        # An array, since torch takes tensors of its own mappings for memory that processes share already.
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8, device="cpu").numpy()


def _load(mapped: Mapped) -> None:
    """Put memory in the place of a file, with its contents."""
    for begin in range(0, mapped.nbytes, _AT_A_TIME):
        part = mapped[begin : begin + _AT_A_TIME]
        contents, flags = part.copy(), _PRIVATE | _ANONYMOUS | _FIXED
        if _libc().mmap(c_void_p(part.ctypes.data), c_size_t(part.nbytes), _READ_AND_WRITE, flags, -1, c_long(0)) == -1:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        part[:] = contents


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
