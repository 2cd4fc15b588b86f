"""Checkpoints become one file, a plain .ckpt or safetensors, and have what they had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_parallel.checkpoint import format, read_plain
from lightning_parallel.checkpoint.keys import OptimizerState
from recipes.weights import convert, read
from tests.strategies.harness import largest_difference

WEIGHTS = {"a": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(3)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of one process that has two optimizers."""
    states = [
        OptimizerState(
            {"b": {"step": torch.tensor(5.0)}, "a": {"exp_avg": torch.ones(3, 4), "kept": 3}},
            [{"lr": 0.1, "params": ["b"]}, {"lr": 0.2, "params": ["a"]}],
        ),
        OptimizerState({}, [{"lr": 0.3, "params": ["a"]}]),
    ]
    path = tmp_path / "last.ckpt"
    format.save(
        path, model=WEIGHTS, optimizers=states, trainer={"epoch": 3, "lr_schedulers": [{}]}, aliases={"d": "a"},
        rank_state={"torch": torch.arange(3)}, coordinate="pp0.dp0.tp0",
    )  # fmt: skip
    return path


def test_a_directory_becomes_what_torch_opens(directory: Path, tmp_path: Path) -> None:
    convert(directory, tmp_path / "plain.ckpt")
    plain = torch.load(tmp_path / "plain.ckpt")
    assert plain["epoch"] == 3 and plain["state_dict"].keys() == {"a", "b", "c", "d"}
    first, second = plain["optimizer_states"]
    assert first["param_groups"] == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    assert first["state"][1]["kept"] == 3 and first["state"][0]["step"] == 5 and second["state"] == {}


def test_weights_become_safetensors_and_come_back(directory: Path, tmp_path: Path) -> None:
    convert(directory, tmp_path / "weights.safetensors")
    convert(tmp_path / "weights.safetensors", tmp_path / "again.ckpt")
    for name in ("weights.safetensors", "again.ckpt"):
        assert largest_difference(read(tmp_path / name), {**WEIGHTS, "d": WEIGHTS["a"]}) == 0
    assert read_plain(tmp_path / "again.ckpt").keys() == {"state_dict"}


def test_a_file_with_other_objects_gives_its_weights_to_those_who_trust_it(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2)}
    torch.save({"state_dict": weights, "hyper_parameters": {"path": Path("here")}}, tmp_path / "it.ckpt")
    target = tmp_path / "weights.safetensors"
    with pytest.raises(ValueError, match="weights_only=False"):
        convert(tmp_path / "it.ckpt", target)
    convert(tmp_path / "it.ckpt", target, weights_only=False)
    assert largest_difference(read(target), weights) == 0


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no file"):
        read(tmp_path / "last.safetensors")


def test_a_damaged_source_leaves_the_target_alone(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.ckpt").write_text("before")
    (tmp_path / "cut.safetensors").write_text("cut")
    (directory / "__0_0.distcp").unlink()
    for source in (directory, tmp_path / "cut.safetensors"):
        with pytest.raises(ValueError, match="is damaged"):
            convert(source, tmp_path / "plain.ckpt")
    assert (tmp_path / "plain.ckpt").read_text() == "before"


def test_a_file_of_bare_weights_stays_what_it_is(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2)}
    torch.save(weights, tmp_path / "it.ckpt")
    convert(tmp_path / "it.ckpt", tmp_path / "again.ckpt")
    assert largest_difference(read(tmp_path / "again.ckpt"), weights) == 0
