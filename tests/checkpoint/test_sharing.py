"""What several ranks hold is written once, and they share it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from lightning_parallel.checkpoint import OptimizerState, read_full, read_plain, save
from lightning_parallel.checkpoint.agreement import RankSummary
from lightning_parallel.checkpoint.sharing import writers
from tests.pool import WorkerPool


def summary(rank: int, sizes: dict[str, int], state: bool = True) -> RankSummary:
    tensors = {f"model/{name}": torch.empty(size) for name, size in sizes.items()}
    if state:
        tensors |= {f"optimizer/0/{name}/exp_avg": torch.empty(size) for name, size in sizes.items()}
    return RankSummary.of(f"pp{rank}", tensors, [{}], [[{"params": [*sizes]}]], (), {})


def test_replicas_write_equal_shares() -> None:
    sizes = {f"layer{i}": 10 * (i + 1) for i in range(8)}
    chosen = writers([summary(rank, sizes) for rank in range(2)], [sizes, sizes])
    shares = [sum(size for name, size in sizes.items() if chosen[name] == rank) for rank in range(2)]
    assert shares == [180, 180]


def test_a_rank_that_has_more_of_its_own_writes_less_of_what_is_shared() -> None:
    ranks = [summary(0, {"own": 100, "a": 10, "b": 10}), summary(1, {"a": 10, "b": 10})]
    assert writers(ranks, [["a", "b"], ["a", "b"]]) == {"a": 1, "b": 1}


def test_what_only_some_holders_have_is_not_left_to_others() -> None:
    """A stage that holds a copy without training it."""
    ranks = [summary(0, {"a": 10}), summary(1, {"a": 10}, state=False)]
    assert writers(ranks, [["a"], ["a"]]) == {}


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
