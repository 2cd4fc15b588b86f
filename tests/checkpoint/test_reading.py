"""A damaged file is named before anything is changed, and another checkpoint is offered; no file runs code."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from lightning_parallel.checkpoint import PlainOnDemand, directory, is_whole, newest_in, read_plain
from lightning_parallel.checkpoint.directory import CONTENTS, METADATA, TRAINER, check_archive, contents_of
from lightning_parallel.checkpoint.format import load
from lightning_parallel.checkpoint.reading import Reader
from tests.checkpoint.test_plain import WEIGHTS, write

FILES = (METADATA, TRAINER, CONTENTS, "__0_0.distcp")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "last.ckpt")


def empty() -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 9) for name, tensor in WEIGHTS.items()}


def load_all(path: Path) -> dict[str, Tensor]:
    """Read it as a rank does; what has been read."""
    model = empty()
    try:
        content = PlainOnDemand(path)
        load(content.reader, content.saved, path, model, {name: model[name] for name in "ab"}, "pp0.dp0.tp0")
    except ValueError:
        assert all(torch.equal(model[name], tensor) for name, tensor in empty().items()), "filled before the error"
        raise
    return model


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [
    lambda whole: b"",
    lambda whole: whole[: len(whole) // 2],
    lambda whole: whole[:-1],
    lambda whole: b"<html>not found</html>" * 100,
    None,
], ids=["empty", "half", "less-a-byte", "another-file", "missing"])  # fmt: skip
@pytest.mark.parametrize("read", [load_all, read_plain], ids=["by-a-rank", "as-one-process"])
def test_a_damaged_file_is_named(
    checkpoint: Path, file: str, damage: Callable[[bytes], bytes] | None, read: Callable[[Path], object]
) -> None:
    if damage is None:
        (checkpoint / file).unlink()
    else:
        (checkpoint / file).write_bytes(damage((checkpoint / file).read_bytes()))
    with pytest.raises(ValueError, match=rf"last.ckpt/{file} is damaged: .*\. Copy it again\."):
        read(checkpoint)
    assert not is_whole(checkpoint)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_named_or_does_no_harm(checkpoint: Path, file: str) -> None:
    """Between the records of an archive there are bytes that mean nothing."""
    whole = (checkpoint / file).read_bytes()
    chosen = random.Random(0)
    named = 0
    for _ in range(40):
        flipped = bytearray(whole)
        flipped[chosen.randrange(len(whole))] ^= 1 << chosen.randrange(8)
        (checkpoint / file).write_bytes(flipped)
        try:
            read = load_all(checkpoint)
        except ValueError as error:
            assert f"last.ckpt/{file} is damaged" in str(error)
            named += 1
        else:
            assert all(torch.equal(read[name], tensor) for name, tensor in WEIGHTS.items())
    assert named >= 12


def test_the_newest_whole_checkpoint_beside_it_is_offered(checkpoint: Path) -> None:
    for age, name in enumerate(["cut.ckpt", "new.ckpt", "old.ckpt"]):
        write(checkpoint.with_name(name))
        os.utime(checkpoint.with_name(name), (1000 - age, 1000 - age))
    (checkpoint.with_name("cut.ckpt") / TRAINER).unlink()
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"Copy it again, or use .*/new\.ckpt, the newest whole checkpoint"):
        load_all(checkpoint)


@pytest.mark.parametrize("file", FILES)
def test_one_that_is_deleted_while_it_is_looked_at_leaves_the_next_one(
    checkpoint: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(checkpoint.with_name("new.ckpt"))
    os.utime(checkpoint, (1000, 1000))
    find = directory.find

    def delete_what_is_found(path: Path) -> Path | None:
        found = find(path)
        if path.name == "new.ckpt":
            (path / file).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(directory, "find", delete_what_is_found)
    assert newest_in([checkpoint.parent]) == checkpoint
    monkeypatch.setattr(directory, "found_in", lambda _: {checkpoint, checkpoint.with_name("gone.ckpt")})
    assert newest_in([checkpoint.parent], since=0) == checkpoint


def test_half_a_file_is_not_whole(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "whole.ckpt")
    content = (tmp_path / "whole.ckpt").read_bytes()
    (tmp_path / "half.ckpt").write_bytes(content[: len(content) // 2])
    assert is_whole(tmp_path / "whole.ckpt") and not is_whole(tmp_path / "half.ckpt")
    assert newest_in([tmp_path]) == tmp_path / "whole.ckpt"
    assert newest_in([tmp_path], but=tmp_path / "whole.ckpt") is None


def test_an_archive_in_the_middle_of_a_file_is_checked(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "one")
    one = (tmp_path / "one").read_bytes()
    row = tmp_path / "row"
    row.write_bytes(one + one + b"rest")
    check_archive(row, row, len(one), len(one))
    with pytest.raises(ValueError, match="row is damaged: it is cut short"):
        check_archive(row, row, len(one), 2 * len(one))


# -- what is pickled runs no code --------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("module", "name"), [
    ("os", "mkdir"), ("pathlib", "os.mkdir"), ("torch", "os.mkdir"),
    ("torch.distributed.checkpoint.metadata", "os.mkdir"), ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
])  # fmt: skip
def test_metadata_can_call_nothing_but_what_belongs_there(checkpoint: Path, module: str, name: str) -> None:
    mark = checkpoint / "mark"
    (checkpoint / METADATA).write_bytes(by_path(module, name, str(mark)))
    (checkpoint / CONTENTS).write_bytes(contents_of(checkpoint, {}))  # an attacker knows how to make a checksum
    with pytest.raises(ValueError, match=rf"asks for {module}\.{name}: it may be an attack"):
        Reader(checkpoint)
    assert not mark.exists()


def test_metadata_with_objects_names_them(checkpoint: Path) -> None:
    """torch unpickles an entry of bytes when it reads it."""
    real = Reader(checkpoint).read_metadata()
    real.state_dict_metadata["model/harmless"] = BytesStorageMetadata()
    (checkpoint / METADATA).write_bytes(pickle.dumps(real))
    (checkpoint / CONTENTS).write_bytes(contents_of(checkpoint, {}))
    with pytest.raises(ValueError, match="objects among its tensors, which could run code: model/harmless"):
        Reader(checkpoint)


def test_a_trainer_file_with_a_call_is_refused_unless_trusted(checkpoint: Path) -> None:
    mark = checkpoint / "mark"
    state = dict.fromkeys(["optimizer_scalars", "param_groups", "extra_state"])
    torch.save({**state, "trainer": Calls(os.mkdir, str(mark))}, checkpoint / TRAINER)
    with pytest.raises(ValueError, match="can run code. If you trust the file, load it with weights_only=False"):
        Reader(checkpoint).trainer(weights_only=True)
    assert not mark.exists()
    Reader(checkpoint).trainer(weights_only=False)
    assert mark.exists()
