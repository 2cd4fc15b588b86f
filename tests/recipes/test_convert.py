"""python -m recipes.convert"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_parallel.checkpoint import read_full
from lightning_parallel.checkpoint.format import save
from recipes import convert

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3)}


def test_a_checkpoint_is_converted_or_what_is_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, plain = tmp_path / "last.ckpt", tmp_path / "plain.ckpt"
    save(checkpoint, model=WEIGHTS, optimizers=[], trainer={}, rank_state={}, coordinate="pp0.dp0.tp0")
    convert.main([str(checkpoint), str(plain)])
    assert capsys.readouterr().out.strip() == str(plain)
    assert torch.equal(read_full(plain)["a"], WEIGHTS["a"])
    (checkpoint / "trainer.pt").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"last.ckpt/trainer.pt is damaged: [^\n]*$"):
        convert.main([str(checkpoint), str(plain)])
    with pytest.raises(SystemExit, match=r"There is no checkpoint at [^\n]*$"):
        convert.main([str(tmp_path / "other.ckpt"), str(plain)])
