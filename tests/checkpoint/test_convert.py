"""What is converted and converted back is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.checkpoint import OptimizerState, convert, is_checkpoint, read_full, read_plain, save
from lightning_parallel.checkpoint.plain import OPTIMIZER_NAMES
from tests.strategies.harness import largest_difference

WEIGHTS = {"a": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(3)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    states = [
        OptimizerState(
            {"b": {"step": torch.tensor(5.0)}, "a": {"exp_avg": torch.ones(3, 4), "kept": 3}},
            [{"lr": 0.1, "params": ["b"]}, {"lr": 0.2, "params": ["a"]}],
        ),
        OptimizerState({}, [{"lr": 0.3, "params": ["a"]}]),
    ]
    path = tmp_path / "last.ckpt"
    save(
        path, model=WEIGHTS, optimizers=states, trainer={"epoch": 3, "lr_schedulers": [{}]}, aliases={"d": "a"},
        rank_state={"torch": torch.arange(3)}, coordinate="pp0.dp0.tp0",
    )  # fmt: skip
    return path


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every value in nested dictionaries and lists, by where it is."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {name: value}
    return {place: each for key, item in items for place, each in flat(item, f"{name}/{key}").items()}


def assert_equal(one: Any, other: Any) -> None:
    mine, theirs = flat(one), flat(other)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value) if isinstance(value, torch.Tensor) else mine[name] == value, name


def test_a_directory_becomes_what_torch_opens(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "plain.ckpt")
    plain = torch.load(tmp_path / "plain.ckpt")
    assert plain["epoch"] == 3 and plain["state_dict"].keys() == {"a", "b", "c", "d"}
    first, second = plain["optimizer_states"]
    assert first["param_groups"] == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    assert first["state"][1]["kept"] == 3 and first["state"][0]["step"] == 5 and second["state"] == {}


def test_a_directory_comes_back(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "plain.ckpt")
    convert(tmp_path / "plain.ckpt", tmp_path / "again.ckpt")
    assert is_checkpoint(tmp_path / "again.ckpt") and (tmp_path / "plain.ckpt").is_file()
    assert_equal(read_plain(tmp_path / "again.ckpt"), read_plain(checkpoint))


def test_weights_come_back_from_safetensors(checkpoint: Path, tmp_path: Path) -> None:
    convert(checkpoint, tmp_path / "weights.safetensors")
    convert(tmp_path / "weights.safetensors", tmp_path / "again.ckpt")
    assert largest_difference(read_full(tmp_path / "again.ckpt"), {**WEIGHTS, "d": WEIGHTS["a"]}) == 0
    assert read_plain(tmp_path / "again.ckpt").keys() == {"state_dict"}


def test_a_file_of_lightning_s_alone_gives_weights_or_names(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    by_name = torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    by_name.step()
    for states in ([by_name.state_dict()], [torch.optim.SGD(model.parameters()).state_dict()]):
        torch.save({"state_dict": model.state_dict(), "optimizer_states": states, "lr_schedulers": []}, tmp_path / "f")
        if "param_names" in states[0]["param_groups"][0]:
            convert(tmp_path / "f", tmp_path / "d")
            assert read_plain(tmp_path / "d")[OPTIMIZER_NAMES] == [[["weight", "bias"]]]
            assert_equal(read_plain(tmp_path / "d")["optimizer_states"], states)
        else:
            with pytest.raises(ValueError, match="has numbers for its optimizer's parameters, and no names"):
                convert(tmp_path / "f", tmp_path / "d")
            convert(tmp_path / "f", tmp_path / "d", save_weights_only=True)
            assert largest_difference(read_full(tmp_path / "d"), model.state_dict()) == 0


def test_a_file_with_other_objects_gives_its_weights_to_those_who_trust_it(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2)}
    torch.save({"state_dict": weights, "hyper_parameters": {"path": Path("here")}}, tmp_path / "it.ckpt")
    target = tmp_path / "weights.safetensors"
    with pytest.raises(ValueError, match="weights_only=False"):
        convert(tmp_path / "it.ckpt", target)
    convert(tmp_path / "it.ckpt", target, weights_only=False)
    assert largest_difference(read_full(target), weights) == 0


def test_a_damaged_source_leaves_the_target_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.ckpt").write_text("before")
    (tmp_path / "cut.safetensors").write_text("cut")
    (checkpoint / "__0_0.distcp").unlink()
    for source in (checkpoint, tmp_path / "cut.safetensors"):
        with pytest.raises(ValueError, match="is damaged"):
            convert(source, tmp_path / "plain.ckpt")
    assert (tmp_path / "plain.ckpt").read_text() == "before"
