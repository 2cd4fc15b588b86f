"""Copies that should be equal are compared bit by bit. Where one differs, all ranks end, and nothing is saved."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_parallel import ReplicaGuard
from lightning_parallel.ranks.local_model import local_part
from lightning_parallel.ranks.writes import digest_of_all
from tests.strategies.failures import assert_refused
from tests.strategies.harness import ALL, make_trainer
from tests.strategies.shardable import ShardableLlama
from tests.thorough import thorough
from tools.optimizer_table import optimizers
from tools.workers.pool import WorkerPool


class Owned(ShardableLlama):
    """Its optimizer treats matrices as wholes, so each has an owner."""

    def configure_optimizers(self) -> Any:
        return optimizers.LAMB(self.parameters(), lr=0.01)


KINDS = {**ALL, "Owned": Owned}
# Ranks, the harness's name of the strategy, the model, and options.
LAYOUTS: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "two replicas": (2, "ddp", "LeNet", {}),
    "three replicas": (3, "ddp", "LeNet", {}),
    "tensor": (2, "tensor", "ShardableLlama", {}),
    "replicas of tensor": (4, "tensor", "ShardableLlama", {"tensor_parallel": 2, "data_parallel": 2}),
    "replicas that share owners": (4, "tensor", "Owned", {"tensor_parallel": 2, "data_parallel": 2}),
    "tied stages": (2, "sync", "GPT2", {"microbatches": 2}),
    "replicas of tied stages": (4, "sync", "GPT2", {"stages": 2, "microbatches": 2}),
    "asynchronous replicas": (4, "async", "GPT2Untied", {"stages": 2, "microbatches": 2}),
    "fully sharded": (2, "fsdp", "LeNet", {}),
    "fully sharded stages": (4, "sync", "GPT2Untied", {"stages": 2, "microbatches": 2,
                                                       "data_parallel_kind": "fully_shard"}),
}  # fmt: skip


class OwnRate(Callback):
    """Gives one replica another learning rate, in a batch in which the strategy doesn't compare rates."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 5:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (2 + trainer.global_rank)


class Flip(Callback):
    """Flips one bit of a parameter on one rank, after a batch, or of its optimizer state under a ``key``."""

    def __init__(self, rank: int, batch: int, name: str, key: str = "") -> None:
        self.rank, self.batch, self.name, self.key = rank, batch, name, key

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_rank == self.rank and trainer.fit_loop.total_batch_idx == self.batch:
            parameter = dict(pl_module.named_parameters())[self.name]
            tensor = trainer.optimizers[0].state[parameter][self.key] if self.key else parameter
            words = local_part(tensor).view(torch.int32).reshape(-1)
            words[len(words) // 2] ^= 1 << 20


def train(layout: str, flip: tuple[Any, ...], every: int, folder: str) -> tuple[str, list[str]]:
    """The error, and what has been saved: after every second update, if a folder is given."""
    _, strategy, model, options = LAYOUTS[layout]
    callbacks: list[Callback] = [*([Flip(*flip)] if flip else []), ReplicaGuard(every)]
    if folder:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1))
    steps = 12 if flip else 4  # a bit that has flipped ends the run
    given = {"max_epochs": -1, "max_steps": steps, "enable_checkpointing": bool(folder)}
    trainer = make_trainer(strategy, callbacks, options, **given)
    error = ""
    try:
        trainer.fit(KINDS[model](), KINDS[model].loader())
    except RuntimeError as caught:
        error = str(caught)
    return error, sorted(each.name for each in Path(folder).glob("*")) if folder else []


OFTEN = ("two replicas", "replicas that share owners")  # of the others, below: up to a bit that flips


@pytest.mark.parametrize("layout", [*OFTEN, *thorough(*(each for each in LAYOUTS if each not in OFTEN))])
def test_copies_stay_equal_in_training(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    found = pool.run(train, LAYOUTS[layout][0], layout, (), 1, str(tmp_path), init=False)
    assert {error for error, _ in found} == {""}
    assert len(found[0][1]) >= 2


@pytest.mark.parametrize(("layout", "flip", "named", "words"), [
    ("three replicas", (1, 3, "net.0.weight"), "'net.0.weight'", "on rank 1 of host .*, unlike 2 other ranks"),
    ("two replicas", (1, 5, "net.0.weight", "exp_avg"), "'optimizer state of net.0.weight'",
     "on rank 0 of host .*, rank 1 of host .*, and no majority"),
    ("tied stages", (0, 3, "model.transformer.wte.weight"), "'model.transformer.wte.weight'",
     r"stage 1 \(rank 0\) .* stage 0 \(rank 1\)"),
    ("tensor", (1, 3, "model.model.norm.weight"), "'model.model.norm.weight'", "shard 0 .* shard 1"),
    ("replicas of tensor", (3, 3, "model.model.layers.0.mlp.up_proj.weight"),
     "'model.model.layers.0.mlp.up_proj.weight'", "replica 0, shard 1 .* replica 1, shard 1"),
    ("fully sharded stages", (2, 3, "model.transformer.wpe.weight"), "'model.transformer.wpe.weight'",
     "replica 0 .* replica 1"),
    *thorough(("asynchronous replicas", (3, 3, "model.transformer.wte.weight"), "'model.transformer.wte.weight'",
               r"stage 0, replica 0 \(rank 2\) .* stage 0, replica 1 \(rank 3\)")),
])  # fmt: skip
def test_the_copy_that_differs_is_named_on_all_ranks(
    pool: WorkerPool, layout: str, flip: tuple[Any, ...], named: str, words: str
) -> None:
    found = pool.run(train, LAYOUTS[layout][0], layout, flip, 3, "", init=False)
    (error,) = {error for error, _ in found}
    assert error.startswith(f"Copies of {named}") and "after update 6:" in error
    assert re.search(words, error), error


def train_with_own_rates() -> None:
    options = {"tensor_parallel": 1, "data_parallel": 2}
    trainer = make_trainer("tensor", [OwnRate(), ReplicaGuard(1)], options)
    trainer.fit(ALL["LeNet"](), ALL["LeNet"].loader(batch_size=1))


def test_replicas_that_part_by_their_learning_rates_are_told_so(pool: WorkerPool) -> None:
    failures = pool.run(train_with_own_rates, 2, init=False, expect_errors=True)
    assert_refused(failures, "RuntimeError", ["'lr' of AdamW", "on replica 1"])


@pytest.mark.parametrize("layout", ["two replicas", *thorough("asynchronous replicas", "tensor")])
def test_a_good_checkpoint_is_not_followed_by_one_of_copies_that_differ(
    pool: WorkerPool, tmp_path: Path, layout: str
) -> None:
    name = {"two replicas": "net.0.weight", "tensor": "model.model.norm.weight"}.get(layout, "model.lm_head.weight")
    found = pool.run(train, LAYOUTS[layout][0], layout, (0, 5, name), 1000, str(tmp_path), init=False)
    (error,) = {error for error, _ in found}
    assert error.startswith(f"Copies of '{name}' differ after update 6")
    assert found[0][1] == ["step=2.ckpt", "step=4.ckpt"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_changed_entry_and_an_exchange_alter_the_digest_of_all(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(4, 6).to(dtype)
    small = torch.ones(())
    own = digest_of_all([values, small])
    assert own == digest_of_all([values.T.contiguous().T, small]) != digest_of_all([small, values])
    negative = values.clone()
    negative[2, 3] = -values[2, 3] if dtype != torch.bool else False
    rows = values[[1, 0, 2, 3]] if dtype != torch.bool else values.flip(1)
    assert len({own, digest_of_all([negative, small]), digest_of_all([rows, small])}) == 3
    if dtype != torch.bool:
        full = torch.full((64, 64), 3).to(dtype)  # a power of two of them, so that a sum of 64 bits may come round
        changed = (full, -full, (full / 2).to(dtype), full + 1, torch.zeros_like(full))
        assert len({digest_of_all([each]) for each in changed}) == len(changed)


def test_settings_and_strategies_that_cannot_be_guarded_are_refused() -> None:
    with pytest.raises(ValueError, match="every=0"):
        ReplicaGuard(every=0)
    with pytest.raises(ValueError, match="SimpleNamespace"):
        trainer: Any = SimpleNamespace(world_size=2, global_step=0, strategy=SimpleNamespace())
        ReplicaGuard().on_train_start(trainer, ALL["LeNet"]())
