"""tools/study/text: batches and held-out windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.tools.study.small import TINY, write_text
from tools.study.text import headers


def test_batches_depend_on_the_seed_alone(tmp_path: Path) -> None:
    task = write_text(tmp_path)
    np.arange(200, dtype=np.uint8).tofile(tmp_path / "train.bin")
    one, again, other = (torch.cat([x for x, _ in task.batches(TINY, seed)]) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    for x, y in task.batches(TINY, 1):
        assert x.shape == (TINY.batch, TINY.context) and torch.equal(x + 1, y)


def test_held_out_windows_are_spread_over_their_own_split(tmp_path: Path) -> None:
    task = write_text(tmp_path)
    np.arange(200, dtype=np.uint8).tofile(tmp_path / "test.bin")
    inputs, targets = task.held_out(TINY, "test", 5)
    assert inputs[:, 0].tolist() == [0, 32, 72, 112, 152] and torch.equal(inputs + 1, targets)
    assert len(task.held_out(TINY, "val", 10**6)[0]) == (200 - 1) // TINY.context


def test_headers_are_megabytes_of_text(tmp_path: Path) -> None:
    folder = headers().build(tmp_path)
    assert (folder / "train.bin").stat().st_size > 10**7 and b"#include <" in (folder / "val.bin").read_bytes()
    assert not any("ops" in file.parts for file in headers().files() if file.parts[0] == "ATen")
    assert headers().fingerprint(folder).startswith("headers sha256:")
