"""recipes/resume.py: a run goes on from its newest whole checkpoint. python -m recipes.convert."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_parallel.checkpoint import read_full
from lightning_parallel.checkpoint.format import save
from recipes import convert, record, resume
from tools.workers.pool import WorkerPool


def config(folder: Path, *, ckpt_path: str | None = None, again: str | None = "auto") -> dict[str, Any]:
    callbacks = {"checkpoint": {"_target_": "...ModelCheckpoint"}, "progress_bar": {"_target_": "...TQDMProgressBar"}}
    return {
        "ckpt_path": ckpt_path, "resume": again, "callbacks": callbacks, "paths": {"output_dir": str(folder)}
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files and a directory; the newest one is half a file, the directory lacks the tensors' index."""
    saved = tmp_path / "checkpoints"
    saved.mkdir()
    for age, name in enumerate(["half.ckpt", "new.ckpt", "old.ckpt"]):
        torch.save({"state_dict": torch.ones(100)}, saved / name)
        os.utime(saved / name, (1000 - age, 1000 - age))
    content = (saved / "half.ckpt").read_bytes()
    (saved / "half.ckpt").write_bytes(content[: len(content) // 2])
    (saved / "part.ckpt").mkdir()
    (saved / "part.ckpt" / "trainer.pt").touch()
    return tmp_path


def test_a_run_that_begins_leaves_an_earlier_one_in_its_folder_alone(folder: Path) -> None:
    assert resume.would_overwrite(config(folder, again=None)) and not resume.would_overwrite(config(folder))
    assert not resume.would_overwrite(config(folder, ckpt_path="last", again=None))
    shutil.rmtree(folder / "checkpoints")
    assert not resume.would_overwrite(config(folder, again=None))
    (folder / record.RUN).write_text('{"status": "completed"}')  # without checkpoints it has logs
    assert resume.would_overwrite(config(folder, again=None))


def test_the_newest_whole_checkpoint_is_found_and_a_damaged_newer_one_warned_of(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"Not whole, so it goes on from .*/new\.ckpt: .*/half\.ckpt.*/part\.ckpt\.$"):
        assert resume.chosen(config(folder)) == str(folder / "checkpoints" / "new.ckpt")
    (folder / "checkpoints" / "new.ckpt").unlink()
    (folder / "checkpoints" / "old.ckpt").unlink()
    with pytest.warns(UserWarning, match="goes on afresh: "):
        assert resume.chosen(config(folder)) is None


def test_last_is_the_same_and_a_path_is_itself(folder: Path) -> None:
    assert resume.chosen(config(folder, ckpt_path="last", again=None)) == str(folder / "checkpoints" / "new.ckpt")
    assert resume.chosen(config(folder, ckpt_path="first.ckpt", again=None)) == "first.ckpt"
    assert resume.chosen(config(folder, again=None)) is None
    shutil.rmtree(folder / "checkpoints")  # then it starts with ckpt_path
    assert resume.chosen(config(folder)) is None
    assert resume.chosen(config(folder, ckpt_path="first.ckpt")) == "first.ckpt"


def test_weights_alone_are_not_what_a_run_goes_on_from(folder: Path) -> None:
    settings = config(folder)
    settings["callbacks"]["checkpoint"]["save_weights_only"] = True
    assert resume.chosen(settings) is None
    whole = {"_target_": "...ModelCheckpoint", "dirpath": str(folder / "checkpoints")}
    settings["callbacks"]["another"] = whole
    assert resume.chosen(settings) == str(folder / "checkpoints" / "new.ckpt")


def start(paths: list[str | None], steps: list[int]) -> str:
    """What a rank says whose own checkpoint is another one."""
    rank, trainer, model = dist.get_rank(), SimpleNamespace(), BoringModel()
    same = resume.SameStart(paths[rank])
    try:
        same.setup(trainer, model, "fit")  # type: ignore[arg-type]
        same.on_load_checkpoint(trainer, model, {"global_step": steps[rank]})  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_would_go_on_from_different_checkpoints_end_the_run(pool: WorkerPool) -> None:
    assert pool.run(start, 3, ["a", "a", "a"], [4, 4, 4]) == [""] * 3
    (said,) = set(pool.run(start, 3, ["a", "a", None], [4, 4, 0]))
    assert said.startswith("rank 0 begins with checkpoint a, rank 2 with None: the run's folder")
    (said,) = set(pool.run(start, 3, ["a", "a", "a"], [4, 2, 4]))
    assert said.startswith("rank 0 begins with step 4, rank 1 with 2")


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
