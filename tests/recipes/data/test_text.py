"""recipes/data/base.py, text.py, sources.py: the same samples at the same step, whatever the layout; windows of bytes,
and sets made of source files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from recipes.data import sources
from recipes.data.base import HELD_OUT, SeededData
from recipes.data.digits import DigitsData
from recipes.data.sources import Sources
from recipes.data.text import TextData, TokenWindows

SEQUENCE = np.arange(50, dtype=np.uint8)


def test_the_smallest_file_has_a_window_in_every_split_and_they_do_not_overlap(tmp_path: Path) -> None:
    file = tmp_path / "text"
    for context in (1, 7, 128):
        file.write_bytes(b"x" * HELD_OUT * (context + 1))
        data = TextData(path=str(file), context=context, batch_size=1)
        data.setup("fit")
        assert min(len(data.val_set), len(data.test_set)) >= 1  # type: ignore[arg-type]
        file.write_bytes(b"x" * (HELD_OUT * (context + 1) - 1))
        with pytest.raises(ValueError, match=rf"too few for windows of {context}; give at least"):
            TextData(path=str(file), context=context)
    file.write_bytes(bytes(range(200)))
    data = TextData(path=str(file), context=3, val_windows=2, batch_size=1)
    data.setup("fit")
    splits = [data.train_set, data.val_set, data.test_set]
    seen = [{int(token) for index in range(len(s)) for token in s[index][1]} for s in splits]  # type: ignore
    assert max(seen[0]) < 180 <= min(seen[1]) and max(seen[1]) < 190 <= min(seen[2])
    assert len(data.train_set) > len(data.val_set) == len(data.test_set) == 2  # type: ignore[arg-type]


def test_windows_have_every_token_as_a_target_once_or_are_spaced_evenly() -> None:
    windows = TokenWindows(SEQUENCE, context=7)
    assert len(windows) == 7
    for tokens, targets in (windows[index] for index in range(len(windows))):
        assert tokens.dtype == torch.int64 and len(tokens) == 7
        assert torch.equal(targets, tokens + 1)
    assert torch.cat([windows[index][1] for index in range(7)]).tolist() == list(range(1, 50))
    windows = TokenWindows(SEQUENCE, context=7, limit=3)
    assert [windows[index][0][0].item() for index in range(len(windows))] == [0, 14, 28]
    assert len(TokenWindows(SEQUENCE, context=7, limit=100)) == 7
    assert len(TokenWindows(SEQUENCE[:8], context=7)) == 1
    with pytest.raises(ValueError, match="7 tokens hold no window of 7"):
        TokenWindows(SEQUENCE[:7], context=7)


@pytest.fixture
def library(tmp_path: Path) -> Sources:
    """A small source tree with what has to be left out."""
    root = tmp_path / "library"
    for number in range(60):
        file = root / ("a" if number % 2 else "b/c") / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"value = {number}\n" * (number + 1))
    for left_out in ("test/test_x.py", "a/tests/test_y.py", "site-packages/other.py", "a/data.txt", "b/left/x.py"):
        (root / left_out).parent.mkdir(parents=True, exist_ok=True)
        (root / left_out).write_text("left out\n")
    return Sources("library", root, ".py", frozenset({"test", "tests", "site-packages", "b/left"}))


def test_files_are_split_whole_none_is_lost_and_another_one_makes_another_set(library: Sources, tmp_path: Path) -> None:
    folder = library.build(tmp_path / "data")
    files = library.files()
    assert len(files) == 60 and files == sorted(files)
    for split in sources.SPLITS:
        mine = [(library.root / file).read_bytes() for file in files if sources.split_of(file) == split]
        assert mine and (folder / f"{split}.bin").read_bytes() == b"".join(text + b"\0" for text in mine)
    assert library.build(tmp_path / "data") == folder
    (library.root / "new.py").write_text("x = 1\n")
    second = library.build(tmp_path / "data")
    assert second != folder
    assert json.loads((second / "meta.json").read_text())["files"] == 61


def test_several_processes_may_build_it_at_once(
    library: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Barrier(4)
    listed = sources.list_hash

    def all_past_the_check(root: Path, files: list[Path]) -> str:
        key = listed(root, files)
        start.wait()
        return key

    monkeypatch.setattr(sources, "list_hash", all_past_the_check)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(library.build(tmp_path / "data"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == [found[0].name]
    assert {file.name for file in found[0].iterdir()} == {"train.bin", "val.bin", "test.bin", "meta.json"}


class Numbers(SeededData):
    """The numbers 0..49 for training and 0..11 for validation."""

    def __init__(self, replicas: int = 1, rank: int = 0, batch_size: int = 6, seed: int = 3) -> None:
        super().__init__(batch_size, workers=0, seed=seed)
        self.train_set = TensorDataset(torch.arange(50))
        self.val_set = self.test_set = TensorDataset(torch.arange(12))
        shard = {"num_replicas": replicas, "rank": rank} if replicas > 1 else None
        self.trainer: Any = SimpleNamespace(distributed_sampler_kwargs=shard)


def epoch(data: Numbers, number: int = 0) -> list[list[int]]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)  # as Lightning does
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_replicas_batches_joined_are_the_single_process_batch(replicas: int) -> None:
    single = epoch(Numbers())
    shards = [epoch(Numbers(replicas, rank)) for rank in range(replicas)]
    joined = [sorted(sum(batches, [])) for batches in zip(*shards, strict=True)]
    assert joined == [sorted(batch) for batch in single]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    torch.manual_seed(0)
    first = epoch(Numbers())
    torch.manual_seed(1)
    assert epoch(Numbers()) == first
    assert epoch(Numbers(), 1) != first
    assert epoch(Numbers(seed=4)) != first


def test_training_batches_are_full_and_shared_and_validation_sees_each_sample_once() -> None:
    assert [len(batch) for batch in epoch(Numbers())] == [6] * 8
    seen = [loader for rank in range(2) for loader in Numbers(2, rank).val_dataloader()]
    assert sorted(torch.cat([batch for (batch,) in seen]).tolist()) == list(range(12))
    with pytest.raises(ValueError, match=r"data.batch_size=6 .* by 4 replicas: use a multiple of 4"):
        Numbers(4).train_dataloader()
    with pytest.raises(ValueError, match=r"data.batch_size=51 is more than the 50 training samples"):
        Numbers(batch_size=51).train_dataloader()


def test_images_are_scaled_and_the_split_does_not_depend_on_the_seed() -> None:
    one, other = DigitsData(seed=1), DigitsData(seed=2)
    one.setup("fit")
    other.setup("fit")
    sizes = [len(split) for split in (one.train_set, one.val_set, one.test_set)]  # type: ignore[arg-type]
    assert sizes == [1437, 180, 180]
    images, labels = next(iter(one.train_dataloader()))
    assert images.shape == (48, 1, 8, 8) and images.dtype == torch.float32
    assert images.min() == 0 and images.max() == 1
    assert labels.dtype == torch.int64 and set(labels.tolist()) <= set(range(10))
    assert all(torch.equal(one.val_set[i][0], other.val_set[i][0]) for i in range(180))
    assert one.fingerprint == other.fingerprint
