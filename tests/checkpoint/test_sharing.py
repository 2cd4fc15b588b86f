"""What several ranks hold is written once, and they share it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from lightning_parallel.checkpoint import OptimizerState, read_full, read_plain, save
from lightning_parallel.checkpoint.agreement import RankSummary, writers
from tests.pool import WorkerPool


def summary(sizes: dict[str, int]) -> RankSummary:
    """Of a rank that holds tensors of these sizes, by key."""
    return RankSummary("", {key: ((size,), torch.int8) for key, size in sizes.items()}, {}, [], [], {})


def test_replicas_write_equal_shares() -> None:
    sizes = {f"model/layer{i}": 10 * (i + 1) for i in range(8)}
    chosen = writers([summary(sizes), summary(sizes)], {f"layer{i}" for i in range(8)})
    shares = [sum(size for key, size in sizes.items() if chosen[key] == rank) for rank in range(2)]
    assert sum(shares) == 360 and max(shares) <= 180 + 80


def test_a_rank_that_has_more_of_its_own_writes_less_of_what_is_shared() -> None:
    shared = {"model/a": 10, "model/b": 10}
    chosen = writers([summary({"model/own": 100, **shared}), summary(shared)], {"a", "b"})
    assert chosen == {"model/own": 0, "model/a": 1, "model/b": 1}


def test_what_only_some_holders_have_is_not_left_to_others() -> None:
    """A stage that holds a copy without training it."""
    chosen = writers([summary({"model/a": 10}), summary({"model/a": 10, "optimizer/0/a/exp_avg": 5})], {"a"})
    assert chosen == {"model/a": 0, "optimizer/0/a/exp_avg": 1}


def test_buffers_are_left_to_the_lowest_rank() -> None:
    assert writers([summary({"model/mean": 1}), summary({"model/mean": 1})], {"a"}) == {}


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
    full = read_full(path)
    assert {name: tensor.reshape(-1)[0].item() for name, tensor in full.items()} == {
        **{f"layer{i}": i for i in range(6)}, "count": 0,
    }  # fmt: skip
    [state] = [each["state"] for each in read_plain(path)["optimizer_states"]]
    assert [(values["exp_avg"][0].item(), values["kept"]) for _, values in sorted(state.items())] == [
        (-i, i) for i in range(6)
    ]
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(sizes) == 3 and max(sizes) < 1.5 * min(sizes)
