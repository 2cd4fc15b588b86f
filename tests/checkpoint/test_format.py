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
from tools.workers.pool import WorkerPool


def whole() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model after three updates, the same in every process."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 2))
    decay = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def names_of(rank: int, size: int) -> list[str]:
    """The names that a rank holds: layers dealt out, the last ones to rank 0."""
    names = list(nn.Module.state_dict(whole()[0]))
    return [name for name in names if int(name.split(".")[0]) % size == size - 1 - rank]


def held(rank: int, size: int, *, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of `save` for one rank."""
    model, optimizer = whole()
    mine = [*names_of(rank, size), *extra]
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {by_id[id(parameter)]: {**values, "kind": "adamw"} for parameter, values in optimizer.state.items()}
    groups = [
        {**group, "params": [by_id[id(p)] for p in group["params"] if by_id[id(p)] in mine]}
        for group in optimizer.param_groups
    ]
    return {
        "model": {name: tensor for name, tensor in model.state_dict().items() if name in mine},
        "optimizers": [OptimizerState({name: values for name, values in state.items() if name in mine}, groups)],
        "trainer": {"epoch": 3, "by": rank},
        "rank_state": {"rng": torch.full((3,), rank, dtype=torch.uint8)},
        "coordinate": f"pp{rank}.dp0.tp0",
        "order": list(by_id.values()),
    }


def blank(rank: int, size: int) -> dict[str, Any]:
    """Arguments of `load` for one rank; the model is filled with something else."""
    model = {name: torch.full_like(tensor, 9) for name, tensor in held(rank, size)["model"].items()}
    return {
        "model": model,
        "parameters": {n: tensor for n, tensor in model.items() if "running" not in n and "num_" not in n},
        "coordinate": f"pp{rank}.dp0.tp0",
    }


def assert_right(optimizers: list[OptimizerState], model: dict[str, Tensor], rank: int, size: int) -> None:
    expected = held(rank, size)
    assert model.keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(model[name], tensor) and model[name].dtype == tensor.dtype, name
    [optimizer], [saved] = optimizers, expected["optimizers"]
    assert optimizer.state.keys() == saved.state.keys()
    for name, values in saved.state.items():
        assert optimizer.state[name].keys() == values.keys()
        for key, value in values.items():
            same = torch.equal(optimizer.state[name][key], value) if isinstance(value, Tensor) else True
            assert same and type(optimizer.state[name][key]) is type(value), (name, key)
    assert [group["params"] for group in optimizer.param_groups] == [
        ["0.weight", "2.weight", "3.weight"],
        ["0.bias", "1.weight", "1.bias", "2.bias", "3.bias"],
    ]
    options = [(group["weight_decay"], group["lr"], group["betas"]) for group in optimizer.param_groups]
    assert options == [(0.1, 0.01, (0.8, 0.9)), (0.0, 0.01, (0.8, 0.9))]


def save_here(path: str, **changes: Any) -> None:
    save(path, **{**held(*place()), **changes})


def load_here(path: str, **changes: Any) -> list[int]:
    """Load and check; what the random generator of this coordinate was saved as."""
    rank, size = place()
    arguments = {**blank(rank, size), **changes}
    optimizers, rank_state = load(path, **arguments)
    assert_right(optimizers, arguments["model"], rank, size)
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
    arguments = held(rank, size, extra=("0.weight",) if what == "drifted" else ())
    if what == "drifted":
        arguments["model"]["0.weight"] += 1e-7 * rank
    elif what == "shape":
        arguments["model"]["buffer"] = torch.zeros(2 + rank)
    elif what == "groups" and rank:
        arguments["optimizers"] = [OptimizerState({}, arguments["optimizers"][0].param_groups[:1])]
    elif what == "optimizers" and rank:
        arguments["optimizers"] = []
    elif what == "options":
        arguments["optimizers"][0].param_groups[1]["lr"] = 0.01 * (rank + 1)
    save(path, **arguments)


@pytest.mark.parametrize(("what", "words"), [
    ("drifted", ["Copies of one parameter differ", "0.weight"]),
    ("shape", ["model/buffer is"]),
    ("groups", ["[2, 1] parameter groups"]),
    ("optimizers", ["[1, 0] optimizers"]),
    ("options", ["parameter group 1 has lr=0.01 on one rank and 0.02 on another"]),
])  # fmt: skip
def test_ranks_that_disagree_are_refused_on_all(pool: WorkerPool, path: str, what: str, words: list[str]) -> None:
    failures = pool.run(save_misfits, 2, path, what, expect_errors=True)
    assert_refused(failures, "RuntimeError" if what == "drifted" else "ValueError", words)
    assert not is_checkpoint(path)


def die_while_writing(path: str) -> None:
    def write(*_: Any) -> None:
        os._exit(7)

    fault = mock.patch.object(FileSystemWriter, "write_data", write)
    with fault if dist.get_rank() == 0 else nullcontext():
        save_here(path, trainer={"epoch": 4})


def test_a_rank_that_dies_while_writing_ends_the_others(pool: WorkerPool, path: str) -> None:
    """Some of four notice it inside of torch's save, while others wait there for them."""
    pool.run(save_here, 4, path)
    first, *others = pool.run(die_while_writing, 4, path, expect_errors=True, timeout=60.0)
    assert "died" in first and all("PeerLostError" in error for error in others)
    load_here(path)


def fail_to_write(path: str) -> None:
    def write(*_: Any) -> None:
        raise OSError("disk on fire")

    fault = mock.patch.object(FileSystemWriter, "write_data", write)
    with fault if dist.get_rank() == 1 else nullcontext():
        save_here(path, trainer={"epoch": 4})


def test_a_rank_that_cannot_write_fails_all_and_leaves_the_old_one(pool: WorkerPool, path: str) -> None:
    pool.run(save_here, 2, path)
    errors = pool.run(fail_to_write, 3, path, expect_errors=True)
    assert all("RuntimeError" in error and "disk on fire" in error and "last.ckpt" in error for error in errors)
    assert "free on its disk" in errors[1]
    assert left_in(path) == ["last.ckpt"]
    load_here(path)


def fail_to_pickle(path: str) -> None:
    save_here(path, trainer={"epoch": lambda: None})


def test_a_trainer_state_that_cannot_be_pickled_fails_all(pool: WorkerPool, path: str) -> None:
    errors = pool.run(fail_to_pickle, 2, path, expect_errors=True)
    assert all("lambda" in error for error in errors)
    assert left_in(path) == []


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
    model = {"2.weight": nn.Parameter(torch.zeros(6, 6, dtype=torch.float64)), "new": torch.ones(2)}
    load(path, model=model, parameters={}, coordinate="pp0", strict=False)
    assert torch.equal(model["2.weight"].float(), whole()[0].get_parameter("2.weight"))
    assert model["new"].tolist() == [1.0, 1.0]


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
