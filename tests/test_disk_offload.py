"""What is made in files has the values, the ties and the generator that it has in memory, and takes none meanwhile."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import io
import os
import pickle
import re
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import disk_offload
from lightning_parallel.disk_offload import DiskOffload
from tools.workers.pool import WorkerPool

MIB = 2**20


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_offload, "LARGE", 1)
    monkeypatch.setattr(disk_offload, "KEPT", 10_000)  # so that memory is dropped often


def mapped_files() -> int:
    return len(re.findall(r"/#\d+ \(deleted\)$", Path("/proc/self/maps").read_text(), re.MULTILINE))


# -- the same as in memory -------------------------------------------------------------------------------------------


class Own(nn.Parameter):
    """A parameter of the user's own class."""


class Everything(nn.Module):
    """What constructors do to tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0)
        self.layers = nn.ModuleList(copy.deepcopy(self.layer) for _ in range(2))
        self.tied = self.layers[1].linear1
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.recurrent = nn.LSTM(8, 8, 2)
        whole = torch.randn(6, 8)
        self.upper, self.lower = nn.Parameter(whole[:3]), nn.Parameter(whole[3:])  # of one memory
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.outside = [whole.numpy(), torch.from_numpy(whole.numpy())]
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())
        self.register_buffer("waves", torch.polar(torch.ones(4), torch.arange(4.0)).conj())
        self.register_buffer("sorted", torch.sort(torch.randn(9))[1])
        nn.init.orthogonal_(self.layer.linear2.weight)
        with torch.no_grad():
            self.upper.mul_(2)
        self.normed(torch.randn(3, 8)).sum().backward()
        self.own = nn.Embedding(5, 8)
        self.own.weight = Own(torch.randn(5, 8))
        sparse = torch.eye(6).to_sparse()
        with torch.no_grad():
            self.own.weight[0].fill_(0)
            self.own.weight.detach().view(-1)[9:].mul_(2)
            sparse._values().mul_(3)
        self.register_buffer("dense", sparse.to_dense())
        slope = torch.func.jvp(lambda x: x * torch.ones(4), (torch.ones(4),), (torch.ones(4),))[1]  # with zero tensors
        self.register_buffer("slope", slope)
        self.register_buffer("chosen", torch.cond(torch.ones(()) > 0, torch.sin, torch.cos, (torch.ones(4),)))
        padded = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
        with torch.no_grad():  # by nested tensors
            mask = torch.arange(3) > torch.tensor([[2], [1]])
            self.register_buffer("masked", padded(torch.ones(2, 3, 16), src_key_padding_mask=mask))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return named | {f"{name}.grad": p.grad for name, p in module.named_parameters() if p.grad is not None}


def sharing(tensors: dict[str, Tensor]) -> set[frozenset[str]]:
    """The names of tensors that lie in one memory."""
    by_memory: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        by_memory.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return {frozenset(names) for names in by_memory.values()}


def test_a_model_is_the_one_that_it_is_in_memory() -> None:
    offload = DiskOffload()
    modules, ends = [], []
    for mode in (nullcontext(), offload):
        torch.manual_seed(0)
        with mode:
            modules.append(Everything())
        ends.append(torch.get_rng_state())
    in_memory, in_files = map(tensors_of, modules)
    assert mapped_files() > 5
    places = {name: tensor.data_ptr() for name, tensor in in_files.items()}
    offload.load()
    assert mapped_files() == 0
    assert in_memory.keys() == in_files.keys() and torch.equal(*ends)
    for name, tensor in in_files.items():
        other = in_memory[name]
        assert torch.equal(tensor, other) and tensor.dtype == other.dtype and type(tensor) is type(other), name
        assert tensor.stride() == other.stride() and tensor.requires_grad == other.requires_grad, name
        assert tensor.data_ptr() == places[name]
    assert sharing(in_memory) == sharing(in_files)


def test_it_may_be_entered_inside_itself_and_copied() -> None:
    offload = DiskOffload()
    with offload, offload:
        weight = torch.ones(64, 64)
        assert mapped_files() == 1
        assert pickle.loads(pickle.dumps(copy.deepcopy(offload))) is not None
    assert weight.sum() == 64 * 64


def test_a_file_of_the_user_s_own_stays_it(tmp_path: Path) -> None:
    file = str(tmp_path / "weights")
    with DiskOffload():
        torch.from_file(file, shared=True, size=4).fill_(3)
    assert torch.from_file(file, size=4).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("early", [False, True])
def test_it_may_be_shared_with_other_processes(early: bool) -> None:
    offload = DiskOffload()
    with offload:
        weight = torch.ones(64, 64)
    if early:
        weight.share_memory_()
    offload.load()
    assert weight.is_shared() == early
    ForkingPickler(io.BytesIO()).dump(weight)
    assert weight.is_shared() and weight.sum() == 64 * 64


# -- memory ----------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes, without what earlier tests have freed and the C library keeps: loading gives that back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_of_a_model_in_files() -> tuple[int, int, int]:
    """What is resident while 256 MiB are made and initialised twice, then of half of it, and the files open for it."""
    before, highest, others = resident(), 0, len(os.listdir("/proc/self/fd"))
    offload = DiskOffload()
    with offload:
        layers = nn.Sequential()
        for _ in range(16):
            layers.append(nn.Linear(2048, 2048, bias=False))
            highest = max(highest, resident())
        for layer in layers:
            nn.init.normal_(layer.weight)
            highest = max(highest, resident())
    files = len(os.listdir("/proc/self/fd"))
    del layers[8:], layer
    gc.collect()
    offload.load()
    return highest - before, resident() - before, files - others


def test_memory_is_taken_by_what_is_loaded_only(pool: WorkerPool) -> None:
    made, loaded, files = pool.run(memory_of_a_model_in_files, 1, init=False)[0]
    assert made < 120 * MIB
    assert 120 * MIB < loaded < 150 * MIB
    assert files < 4


# -- where there is no disk ------------------------------------------------------------------------------------------


def full(file: int, begin: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_without_a_folder_or_on_a_full_disk_models_are_made_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No such file or directory"):
        patch.setenv("TMPDIR", str(tmp_path / "none"))
        with DiskOffload():
            assert torch.ones(4).sum() == 4
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(UserWarning, match="No space left.*Set TMPDIR") as told, DiskOffload():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch.manual_seed(0)
    assert torch.equal(module[0].weight, nn.Linear(8, 8).weight)
    assert mapped_files() == 0 and len(told) == 1
