"""What ranks that save together agree on, what each of them writes, and what is read in another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.checkpoint import read_plain
from lightning_parallel.checkpoint.agreement import RankSummary, merge_groups, writers
from lightning_parallel.checkpoint.format import save
from lightning_parallel.checkpoint.keys import OptimizerState, key_in, nearest
from tools.workers.pool import WorkerPool


def test_options_that_are_tensors_merge_where_they_are_equal() -> None:
    groups, others = ([{"lr": torch.tensor(rate), "params": []}] for rate in (0.5, 0.2))
    assert merge_groups([groups, groups], [])[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="parameter group 0 has"):
        merge_groups([groups, others], [])
    with pytest.raises(ValueError, match="maximize"):  # one that a rank lacks is no None of another
        merge_groups([[{"params": ["a"], "maximize": None}], [{"params": ["b"]}]], [])


# -- what several ranks hold is written once, and they share it --------------------------------------------------


def summary(sizes: dict[str, int]) -> RankSummary:
    """Of a rank that holds tensors of these sizes, by key."""
    return RankSummary({key: ((size,), torch.int8) for key, size in sizes.items()}, {}, [], [], {})


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
