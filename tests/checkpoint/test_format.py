"""One format for every layout: what ranks that save agree on, what each of them writes, and what others read."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_parallel.checkpoint import PlainOnDemand, format, is_checkpoint, read_plain
from lightning_parallel.checkpoint.agreement import RankSummary, agree, merge_groups, writers
from lightning_parallel.checkpoint.format import save
from lightning_parallel.checkpoint.keys import OptimizerState, key_in, nearest
from lightning_parallel.checkpoint.rank_states import optimizer_state
from lightning_parallel.ranks.collectives import together
from tests.strategies.failures import assert_refused
from tests.strategies.harness import largest_difference
from tools.workers.pool import WorkerPool

NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]


def held(rank: int, size: int) -> dict[str, Any]:
    """Arguments of `save` for one rank: parameters are dealt out, the last ones to rank 0."""
    mine = [name for k, name in enumerate(NAMES) if k % size == size - 1 - rank]
    state = {name: {"exp_avg": torch.full((2, 3), float(NAMES.index(name))), "kind": f"of {name}"} for name in mine}
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
    for name, values in saved.state.items():
        assert optimizer.state[name].pop("kind") == values.pop("kind")
        assert largest_difference(optimizer.state[name], values) == 0
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


def test_any_layout_opens_what_three_ranks_saved(pool: WorkerPool, path: str) -> None:
    pool.run(save_here, 3, path)
    assert is_checkpoint(path) and os.listdir(Path(path).parent) == ["last.ckpt"]
    for size in (1, 4):
        # A fourth stage loads the same batches as the others: it goes on with the generators of one of them.
        assert pool.run(load_here, size, path) == [[rank if rank < 3 else 0] * 3 for rank in range(size)]


def save_drifted(path: str) -> None:
    rank, size = place()
    save_here(path, model=held(rank, size)["model"] | {"a.weight": torch.full((2, 3), 1e-7 * rank)})


def test_copies_that_have_drifted_apart_are_refused_on_all_ranks(pool: WorkerPool, path: str) -> None:
    failures = pool.run(save_drifted, 2, path, expect_errors=True)
    assert_refused(failures, "RuntimeError", ["Copies of one parameter differ", "a.weight"])
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
    assert read_plain(path)["epoch"] == 3
    errors = pool.run(fail_to_write, 3, path, 1, False, expect_errors=True)
    assert all("RuntimeError" in error and "disk on fire" in error and "last.ckpt" in error for error in errors)
    assert "free on its disk" in errors[1]
    assert read_plain(path)["epoch"] == 3
    errors = pool.run(fail_to_pickle, 2, path, expect_errors=True)
    assert all("lambda" in error for error in errors)
    assert os.listdir(Path(path).parent) == ["last.ckpt"]


def test_without_strict_what_fits_is_read_in_the_models_dtype_and_the_rest_stays(path: str) -> None:
    save_here(path)
    model = {"b.weight": nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)), "new": torch.ones(2)}
    load(path, model=model, parameters={}, coordinate="pp0", strict=False)
    assert model["b.weight"].unique().tolist() == [-3.0] and model["new"].tolist() == [1.0, 1.0]


# -- what ranks that save together agree on, and what each of them writes ---------------------------------------


def test_the_first_parameter_by_name_is_refused_whatever_order_a_set_has() -> None:
    parameters = {f"layers.{i}.weight": torch.nn.Parameter(torch.zeros(2)) for i in range(64)}
    names = {id(parameter): name for name, parameter in parameters.items()}
    local: Any = SimpleNamespace(names=names, parameters=parameters, shards=parameters)
    optimizer = torch.optim.SGD(parameters.values())
    optimizer.state.update({parameter: {"kept": torch.zeros(3)} for parameter in parameters.values()})
    with pytest.raises(ValueError, match="'kept' of shape .* for 'layers.0.weight'"):
        optimizer_state(optimizer, local)


def test_options_that_are_tensors_merge_where_they_are_equal() -> None:
    groups, others = ([{"lr": torch.tensor(rate), "params": []}] for rate in (0.5, 0.2))
    assert merge_groups([groups, groups], [])[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="parameter group 0 has"):
        merge_groups([groups, others], [])
    with pytest.raises(ValueError, match="maximize"):  # one that a rank lacks is no None of another
        merge_groups([[{"params": ["a"], "maximize": None}], [{"params": ["b"]}]], [])
    with pytest.raises(ValueError, match=r"\[2, 1\] parameter groups"):
        merge_groups([groups * 2, groups], [])


def summary(sizes: dict[str, int]) -> RankSummary:
    """Of a rank that holds tensors of these sizes, by key."""
    return RankSummary({key: ((size,), torch.int8) for key, size in sizes.items()}, {}, [], [], {})


@pytest.mark.parametrize(("ranks", "said"), [
    ([summary({"model/buffer": 2}), summary({"model/buffer": 3})], "model/buffer is"),
    ([replace(summary({}), param_groups=[[{"params": []}]]), summary({})], r"\[1, 0\] optimizers"),
])  # fmt: skip
def test_ranks_that_disagree_are_refused(ranks: list[RankSummary], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        agree(ranks, [])


def test_a_rank_that_has_more_of_its_own_writes_less_of_what_is_shared() -> None:
    shared = {"model/a": 10, "model/b": 10}
    chosen = writers([summary({"model/own": 100, **shared}), summary(shared)], {"a", "b"})
    assert chosen == {"model/own": 0, "model/a": 1, "model/b": 1}
    # What only some holders have isn't left to others: a stage may hold a copy without training it.
    chosen = writers([summary({"model/a": 10}), summary({"model/a": 10, "optimizer/0/a/exp_avg": 5})], {"a"})
    assert chosen == {"model/a": 0, "optimizer/0/a/exp_avg": 1}


def save_replica(path: Path) -> None:
    rank = dist.get_rank()
    model = {f"layer{i}": torch.full((100,), float(i)) for i in range(6)} | {"count": torch.tensor(rank)}
    names = [name for name in model if name != "count"]
    state = {name: {"exp_avg": torch.full((100,), -float(i)), "kept": i} for i, name in enumerate(names)}
    optimizers = [OptimizerState(state, [{"lr": 0.1, "params": names}])]
    trainer = {"lr_schedulers": []}
    save(path, model=model, optimizers=optimizers, trainer=trainer, rank_state={}, coordinate=f"dp{rank}")


def test_nothing_is_missing_and_the_files_are_of_one_size(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    pool.run(save_replica, 3, path)
    plain = read_plain(path)
    first = {name: tensor.reshape(-1)[0].item() for name, tensor in plain["state_dict"].items()}
    assert first == {**{f"layer{i}": i for i in range(6)}, "count": 0}
    state = plain["optimizer_states"][0]["state"]
    assert [(state[i]["exp_avg"][0].item(), state[i]["kept"]) for i in range(6)] == [(-i, i) for i in range(6)]
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(sizes) == 3 and max(sizes) < 1.5 * min(sizes)


# -- generators --------------------------------------------------------------------------------------------------

SAVED = ["pp0.dp0.tp0", "pp0.dp1.tp0", "pp1.dp0.tp0", "pp1.dp1.tp0"]


@pytest.mark.parametrize(("coordinate", "expected"), [
    ("pp1.dp1.tp0", "pp1.dp1.tp0"),
    ("pp2.dp1.tp0", "pp0.dp1.tp0"),
    ("pp0.dp0.tp1", "pp0.dp0.tp0"),
    ("pp0.dp2.tp0", None),
])  # fmt: skip
def test_generators_are_those_of_the_same_replica(coordinate: str, expected: str | None) -> None:
    found = {} if expected is None else {"torch": key_in(expected, "torch")}
    assert nearest(coordinate, [key_in(place, "torch") for place in SAVED]) == found
