"""One format for every layout: any number of processes writes it, any other number reads it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_parallel.checkpoint import PlainOnDemand, format, is_checkpoint
from lightning_parallel.checkpoint.format import save
from lightning_parallel.checkpoint.keys import OptimizerState
from lightning_parallel.ranks.collectives import together
from tests.strategies.failures import assert_refused
from tests.strategies.harness import largest_difference
from tools.workers.pool import WorkerPool

NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]


def held(rank: int, size: int) -> dict[str, Any]:
    """Arguments of `save` for one rank: parameters are dealt out, the last ones to rank 0."""
    mine = [name for k, name in enumerate(NAMES) if k % size == size - 1 - rank]
    state = {name: {"exp_avg": torch.full((2, 3), float(NAMES.index(name)))} for name in mine}
    return {
        "model": {name: torch.full((2, 3), -1.0 - NAMES.index(name)) for name in mine},
        "optimizers": [OptimizerState(state, [{"lr": 0.01, "params": mine}, {"lr": 0.1, "params": []}])],
        "trainer": {"epoch": 3, "by": rank},
        "rank_state": {"rng": torch.full((3,), rank, dtype=torch.uint8)},
        "coordinate": f"pp{rank}.dp0.tp0",
        "order": NAMES,
    }


def blank(rank: int, size: int) -> dict[str, Any]:
    """Arguments of `load` for one rank; the model is filled with something else."""
    model = {name: torch.full_like(tensor, 9) for name, tensor in held(rank, size)["model"].items()}
    return {"model": model, "parameters": model, "coordinate": f"pp{rank}.dp0.tp0"}


def save_here(path: str, **changes: Any) -> None:
    save(path, **{**held(*place()), **changes})


def load_here(path: str) -> list[int]:
    """Load and check; what the random generator of this coordinate was saved as."""
    expected, arguments = held(*place()), blank(*place())
    (optimizer,), rank_state = load(path, **arguments)
    assert largest_difference(arguments["model"], expected["model"]) == 0
    (saved,) = expected["optimizers"]
    assert optimizer.state.keys() == saved.state.keys()
    assert all(largest_difference(optimizer.state[name], saved.state[name]) == 0 for name in saved.state)
    assert [(group["lr"], group["params"]) for group in optimizer.param_groups] == [(0.01, NAMES), (0.1, [])]
    assert PlainOnDemand(path).saved["trainer"] == {"epoch": 3, "by": 0}
    return rank_state["rng"].tolist() if rank_state else []


def load(path: str, **arguments: Any) -> tuple[list[OptimizerState], dict[str, Tensor]]:
    content = together(None, lambda: PlainOnDemand(path))
    return format.load(content.reader, content.saved, path, **arguments)


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "runs" / "last.ckpt")


def left_in(path: str) -> list[str]:
    return sorted(os.listdir(Path(path).parent))


def test_any_layout_opens_what_three_ranks_saved(pool: WorkerPool, path: str) -> None:
    pool.run(save_here, 3, path)
    assert is_checkpoint(path) and left_in(path) == ["last.ckpt"]
    for size in (1, 4):
        # A fourth stage loads the same batches as the others: it goes on with the generators of one of them.
        assert pool.run(load_here, size, path) == [[rank if rank < 3 else 0] * 3 for rank in range(size)]


def save_misfits(path: str, what: str) -> None:
    rank, size = place()
    arguments = held(rank, size)
    if what == "drifted":
        arguments["model"]["a.weight"] = torch.full((2, 3), 1e-7 * rank)
    elif what == "shape":
        arguments["model"]["buffer"] = torch.zeros(2 + rank)
    elif what == "groups" and rank:
        arguments["optimizers"] = [OptimizerState({}, arguments["optimizers"][0].param_groups[:1])]
    elif what == "optimizers" and rank:
        arguments["optimizers"] = []
    save(path, **arguments)


@pytest.mark.parametrize(("what", "words"), [
    ("drifted", ["Copies of one parameter differ", "a.weight"]),
    ("shape", ["model/buffer is"]),
    ("groups", ["[2, 1] parameter groups"]),
    ("optimizers", ["[1, 0] optimizers"]),
])  # fmt: skip
def test_ranks_that_disagree_are_refused_on_all(pool: WorkerPool, path: str, what: str, words: list[str]) -> None:
    failures = pool.run(save_misfits, 2, path, what, expect_errors=True)
    assert_refused(failures, "RuntimeError" if what == "drifted" else "ValueError", words)
    assert not is_checkpoint(path)


def fail_to_write(path: str, rank: int, dies: bool) -> None:
    def write(*_: Any) -> None:
        if dies:
            os._exit(7)
        raise OSError("disk on fire")

    fault = mock.patch.object(FileSystemWriter, "write_data", write)
    with fault if dist.get_rank() == rank else nullcontext():
        save_here(path, trainer={"epoch": 4})


def fail_to_pickle(path: str) -> None:
    save_here(path, trainer={"epoch": lambda: None})


def test_a_rank_that_fails_while_writing_ends_all_and_leaves_the_old_one(pool: WorkerPool, path: str) -> None:
    """Of four, some notice one that dies inside of torch's save, while others wait there for them."""
    pool.run(save_here, 4, path)
    first, *others = pool.run(fail_to_write, 4, path, 0, True, expect_errors=True, timeout=60.0)
    assert "died" in first and all("PeerLostError" in error for error in others)
    load_here(path)
    errors = pool.run(fail_to_write, 3, path, 1, False, expect_errors=True)
    assert all("RuntimeError" in error and "disk on fire" in error and "last.ckpt" in error for error in errors)
    assert "free on its disk" in errors[1]
    load_here(path)
    errors = pool.run(fail_to_pickle, 2, path, expect_errors=True)
    assert all("lambda" in error for error in errors)
    assert left_in(path) == ["last.ckpt"]


def load_more(path: str) -> None:
    rank, size = place()
    arguments = blank(rank, size)
    if rank == 1:
        arguments["model"] |= {f"new.{k}": torch.zeros(1) for k in range(7)}
    load(path, **arguments)


def test_names_that_are_missing_are_refused_on_all_ranks(pool: WorkerPool, path: str) -> None:
    save_here(path)
    failures = pool.run(load_more, 3, path, expect_errors=True)
    assert_refused(failures, "ValueError", ["new.0 is missing in it, ", "new.4 is missing in it, and 2 more"])


def test_without_strict_what_fits_is_read_in_the_models_dtype_and_the_rest_stays(path: str) -> None:
    save_here(path)
    model = {"b.weight": nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)), "new": torch.ones(2)}
    load(path, model=model, parameters={}, coordinate="pp0", strict=False)
    assert model["b.weight"].unique().tolist() == [-3.0] and model["new"].tolist() == [1.0, 1.0]


def test_tensors_of_any_shape_and_dtype_come_back(path: str) -> None:
    state = {
        "none": torch.zeros(0, 3),
        "one": torch.tensor(3),
        "strided": torch.arange(12.0).reshape(3, 4).t()[1:],
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "low": torch.tensor([1.5], dtype=torch.bfloat16),
    }
    empty: dict[str, Any] = {"optimizers": [], "trainer": {}, "rank_state": {}}
    save(path, model=state, coordinate="pp0", **empty)
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    nothing = load(path, model=found, parameters={"one": found["one"]}, coordinate="pp0")
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert nothing == ([], {}) and PlainOnDemand(path).saved["trainer"] == {}
