"""The pickled files of a checkpoint run no code, whatever they hold, and a damaged one is named."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lightning_parallel.checkpoint.directory import CONTENTS, METADATA, TRAINER
from lightning_parallel.checkpoint.format import save
from lightning_parallel.checkpoint.reading import Reader

TRAINER_STATE = {"epoch": 3, "loops": {"seen": [1, 2]}, "sum": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    tensors = {"net.weight": torch.zeros(2, 3), "net.steps": torch.zeros((), dtype=torch.int64)}
    save(path, model=tensors, optimizers=[], trainer=TRAINER_STATE, rank_state={}, coordinate="pp0")
    return path


class Calls:
    """Pickled, it is a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def by_path(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls ``module.name(argument)``, where the name may lead through other modules."""
    file = io.BytesIO()
    file.write(pickle.PROTO + b"\x04")
    for text in (module, name):
        file.write(pickle.BINUNICODE + struct.pack("<I", len(text)) + text.encode())
    file.write(pickle.STACK_GLOBAL + pickle.BINUNICODE + struct.pack("<I", len(argument)) + argument.encode())
    file.write(pickle.TUPLE1 + pickle.REDUCE + pickle.STOP)
    return file.getvalue()


def test_what_save_wrote_is_read(checkpoint: Path) -> None:
    found = Reader(checkpoint).found
    assert {key: (tuple(each.shape), each.dtype) for key, each in found.items()} == {
        "model/net.weight": ((2, 3), torch.float32),
        "model/net.steps": ((), torch.int64),
    }
    for weights_only in (True, False):
        state = Reader(checkpoint).trainer(weights_only)["trainer"]
        assert torch.equal(state.pop("sum"), TRAINER_STATE["sum"])  # type: ignore[arg-type]
        assert state == {"epoch": 3, "loops": {"seen": [1, 2]}}


@pytest.mark.parametrize(("module", "name"), [
    ("os", "mkdir"),
    ("pathlib", "os.mkdir"),
    ("torch", "os.mkdir"),
    ("torch.serialization", "os.mkdir"),
    ("torch.distributed.checkpoint.metadata", "os.mkdir"),
    ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
])  # fmt: skip
def test_metadata_can_call_nothing_but_what_belongs_there(checkpoint: Path, module: str, name: str) -> None:
    mark = checkpoint / "mark"
    (checkpoint / METADATA).write_bytes(by_path(module, name, str(mark)))
    (checkpoint / CONTENTS).unlink()  # an attacker knows how to make a checksum
    with pytest.raises(ValueError, match=rf"asks for {module}\.{name}: it may be an attack"):
        Reader(checkpoint)
    assert not mark.exists()


def test_an_attack_works_where_nothing_stops_it(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    pickle.loads(by_path("pathlib", "os.mkdir", str(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def test_metadata_with_objects_names_them(checkpoint: Path) -> None:
    """torch unpickles an entry of bytes when it reads it."""
    real = Reader(checkpoint).read_metadata()
    real.state_dict_metadata["model/harmless"] = BytesStorageMetadata()
    (checkpoint / METADATA).write_bytes(pickle.dumps(real))
    (checkpoint / CONTENTS).unlink()
    with pytest.raises(ValueError, match="objects among its tensors, which could run code: model/harmless"):
        Reader(checkpoint)


@pytest.mark.parametrize("function", [os.mkdir, subprocess.call, Path])
def test_a_trainer_file_with_a_call_is_refused_unless_trusted(checkpoint: Path, function: Callable[..., Any]) -> None:
    mark = checkpoint / "mark"
    argument: Any = ["mkdir", str(mark)] if function is subprocess.call else str(mark)
    state = dict.fromkeys(["optimizer_scalars", "param_groups", "extra_state"])
    state = {**state, "trainer": Calls(function, argument)}
    torch.save(state, checkpoint / TRAINER)
    with pytest.raises(ValueError, match="can run code. If you trust the file, load it with weights_only=False"):
        Reader(checkpoint).trainer(weights_only=True)
    assert not mark.exists()
    Reader(checkpoint).trainer(weights_only=False)
    assert mark.exists() == (function is not Path)
