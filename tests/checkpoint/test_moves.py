"""What any layout has saved, in the middle of an epoch, goes on under any other as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_parallel.checkpoint import convert, read_full, read_plain
from tests.checkpoint.moved import MOVED, TOLERANCE, Moved, Runs
from tests.strategies.harness import largest_difference
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

SYNCHRONOUS = [name for name in MOVED if name != "async2"]
OFTEN = ["single", "ddp2", "fsdp2 x tp2"]  # targets in every run of the tests


class Counting(Moved):
    """It keeps something that is neither a parameter nor a buffer."""

    counted = 0.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.counted)

    def set_extra_state(self, state: Tensor) -> None:
        self.counted = state.item()

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.counted += 1


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("moves"), Counting)


def converted(path: Path) -> Path:
    """A directory as a plain file."""
    other = path.with_name(f"{path.stem} converted.ckpt")
    if not other.exists():
        convert(path, other)
    return other


def assert_same(one: Path, other: Path) -> None:
    """The same weights, counts, optimizer states and schedulers."""
    assert "_extra_state" in read_full(one)
    assert largest_difference(read_full(one), read_full(other)) < TOLERANCE
    plain, expected = read_plain(one), read_plain(other)
    for mine, theirs in zip(plain["optimizer_states"], expected["optimizer_states"], strict=True):
        assert [group["lr"] for group in mine["param_groups"]] == [group["lr"] for group in theirs["param_groups"]]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            assert largest_difference(mine["state"][number], state) < TOLERANCE
    assert plain["global_step"] == expected["global_step"]


@pytest.mark.parametrize("source", ["tp2 x pp2", *thorough(*(name for name in MOVED if name != "tp2 x pp2"))])
@pytest.mark.parametrize("target", [*OFTEN, *thorough(*(name for name in SYNCHRONOUS if name not in OFTEN))])
def test_a_run_goes_on_under_another_layout(runs: Runs, source: str, target: str) -> None:
    middle = runs.run("none", source)[0]
    # A synchronous run has the numbers of one process. One that began asynchronously goes on as one process does from
    # there; that process reads the checkpoint's other kind.
    expected = runs.run("none", "single", None if source in SYNCHRONOUS else converted(middle))
    assert_same(runs.run("none", target, middle)[1], expected[1])


@pytest.mark.parametrize("source", ["ddp2", "async2", *thorough(*(s for s in SYNCHRONOUS if s != "ddp2"))])
def test_an_asynchronous_run_goes_on_from_another_layout(runs: Runs, source: str) -> None:
    middle, end, _ = runs.run("none", source)
    first = runs.run("none", "single")[0] if source in SYNCHRONOUS else converted(middle)
    found = runs.run("none", "async2", middle)[1]
    assert_same(found, runs.run("none", "async2", first)[1])
    if source == "async2":
        assert largest_difference(read_full(found), read_full(end)) == 0
