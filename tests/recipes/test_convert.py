"""python -m recipes.convert"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_parallel.checkpoint import is_checkpoint, read_full
from lightning_parallel.checkpoint.format import save
from recipes import convert

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    save(path, model=WEIGHTS, optimizers=[], trainer={"epoch": 3}, rank_state={}, coordinate="pp0.dp0.tp0")
    return path


def test_files_are_made_of_each_kind(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = [checkpoint, *(tmp_path / name for name in ("plain.ckpt", "weights.safetensors", "w.ckpt"))]
    for source, target in zip(chain, chain[1:], strict=False):
        convert.main([str(source), str(target)])
        assert capsys.readouterr().out.strip() == str(target)
        assert torch.equal(read_full(target)["a"], WEIGHTS["a"])
    assert [is_checkpoint(path) for path in chain] == [True, False, False, False]


def test_what_is_wrong_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "trainer.pt").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"last.ckpt/trainer.pt is damaged: [^\n]*$"):
        convert.main([str(checkpoint), str(tmp_path / "plain.ckpt")])
    with pytest.raises(SystemExit, match=r"There is no checkpoint at [^\n]*$"):
        convert.main([str(tmp_path / "other.ckpt"), str(tmp_path / "plain.ckpt")])
