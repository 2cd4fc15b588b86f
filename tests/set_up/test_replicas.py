"""Replicas have together the numbers of a single process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional

import lightning_parallel as lp
from tests.strategies.equality import EXACT
from tests.strategies.failures import assert_refused
from tests.strategies.harness import joined, largest_difference, make_trainer, train
from tests.strategies.models import LeNet
from tools.workers.pool import WorkerPool


def test_asynchronous_replicas_are_whole() -> None:
    with pytest.raises(ValueError, match=r"data_parallel_kind='fully_shard'.*PipelineStrategy"):
        lp.AsyncPipelineStrategy(data_parallel_kind="fully_shard")


def test_asynchronous_replicas_have_the_numbers_of_one_pipeline(pool: WorkerPool) -> None:
    """Microbatch k of the one is those of the two replicas together, so it is computed with the same weights."""
    options = {"stages": 2, "microbatches": 2}
    given = {"accumulate_grad_batches": 2, "max_epochs": 2, "samples": 20, "init": False}
    whole = pool.run(train, 2, "LeNet", "async", options, **given)
    reports = pool.run(train, 4, "LeNet", "async", options, batch_size=4, **given)
    assert largest_difference(joined(reports, "weights"), joined(whole, "weights")) < EXACT


class Shifted(Callback):
    """Every rank begins with weights of its own."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for parameter in pl_module.parameters():
            parameter.data.add_(trainer.global_rank)


@pytest.mark.parametrize(("model", "strategy", "options"), [
    ("ShardableLlama", "tensor", {"tensor_parallel": 2}),
    ("ShardableLlama", "tensor", {"tensor_parallel": 1, "data_parallel": 2}),
    ("ShardableLlama", "sync", {"stages": 1}),
    ("Blocks", "sync", {"microbatches": 1}),  # stages share parameters
])  # fmt: skip
def test_copies_begin_equal_whatever_the_ranks_were_given(
    pool: WorkerPool, model: str, strategy: str, options: dict[str, Any]
) -> None:
    joined(pool.run(train, 2, model, strategy, options, callbacks=[Shifted()], init=False), "weights")  # they agree


class Normalised(LeNet):
    """With statistics that differ between replicas."""

    def build(self) -> None:
        super().build()
        self.net.insert(1, torch.nn.BatchNorm2d(4))


def buffers_after() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What training has left on this rank, and what validation and checkpoints see."""
    torch.set_default_dtype(torch.float64)
    module = Normalised()
    trainer = make_trainer("sync", [], {"stages": 1}, max_epochs=1)
    trainer.fit(module, Normalised.loader(batch_size=4))
    trained = {name: buffer.clone() for name, buffer in module.named_buffers()}
    trainer.validate(module, Normalised.loader(), verbose=False)
    return trained, dict(module.named_buffers())


def test_statistics_are_the_first_replica_s_wherever_they_are_used(pool: WorkerPool) -> None:
    (trained, seen), (other, also_seen) = pool.run(buffers_after, 2, init=False)
    assert not torch.equal(trained["net.1.running_mean"], other["net.1.running_mean"])
    for name, buffer in trained.items():
        assert torch.equal(seen[name], buffer) and torch.equal(also_seen[name], buffer), name


class Queued(LeNet):
    """A loss against the features of earlier batches, which a buffer keeps."""

    def build(self) -> None:
        super().build()
        self.register_buffer("queue", torch.zeros(12, 10))

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        features = self.net(images)
        loss = functional.cross_entropy(features, labels) + (features @ self.queue.T).square().mean()
        if self.training:
            self.queue = torch.cat([features.detach(), self.queue])[:12]
        return loss


@pytest.mark.parametrize(("strategy", "options"), [("fsdp", {}), ("sync", {"stages": 1})])
def test_replicas_read_what_the_first_has_kept_of_earlier_batches_as_under_ddp(
    pool: WorkerPool, strategy: str, options: dict[str, Any]
) -> None:
    ddp, reports = (
        pool.run(train, 2, Queued, name, given, init=False, batch_size=4, shuffle=False)
        for name, given in (("ddp", {}), (strategy, options))
    )
    assert largest_difference(joined(reports, "weights"), joined(ddp, "weights")) < EXACT


class Growing(LeNet):
    """It counts its batches in a buffer that grows with them, on the first replica only."""

    def build(self) -> None:
        super().build()
        self.register_buffer("seen", torch.zeros(1))

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen = torch.cat([self.seen, self.seen + 1]) if self.global_rank == 0 else self.seen + 1


def test_buffers_of_unequal_sizes_are_refused(pool: WorkerPool) -> None:
    given = {"batch_size": 4, "limit_val_batches": 0, "init": False, "expect_errors": True}
    failures = pool.run(train, 2, Growing, "sync", {"stages": 1}, **given)
    assert_refused(failures, "ValueError", ["'seen'", "persistent=False"])


class Plateaued(LeNet):
    """Its rate falls with a value of its own: on the second replica only, which sees it rise."""

    synchronised = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        sign = 1 - 2 * self.trainer.strategy.layout.index("data")  # type: ignore[attr-defined]
        self.log("own", -float(sign * self.global_step), on_epoch=True, sync_dist=self.synchronised)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}


class Synchronised(Plateaued):
    synchronised = True


class ByHand(LeNet):
    """The second replica's rate is another one from the third update on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            rate = 0.1 * (1 + self.trainer.strategy.layout.index("data"))  # type: ignore[attr-defined]
            self.trainer.optimizers[0].param_groups[0]["lr"] = rate


def fit_with_rates(model: type[LeNet], strategy: str, options: dict[str, Any], directory: Path, saves: bool) -> int:
    given = {"max_epochs": 3, "limit_val_batches": 0, "limit_train_batches": 4}
    trainer = make_trainer(strategy, [], options, **given, enable_checkpointing=saves, default_root_dir=directory)
    try:
        trainer.fit(model(), model.loader(batch_size=2))
    finally:
        assert not [*directory.rglob("*.ckpt")] or model is Synchronised
    return trainer.global_step


@pytest.mark.parametrize(("model", "strategy", "ranks", "options", "words"), [
    (Plateaued, "async", 4, {"stages": 2, "microbatches": 2}, ["'lr' of SGD, group 0", "'own'", "sync_dist=True"]),
    (ByHand, "fsdp", 2, {}, ["'lr' of Adam", "0.1 on replica 0 and 0.2 on replica 1"]),
    (Synchronised, "fsdp", 2, {}, None),
])  # fmt: skip
def test_replicas_whose_rates_have_parted_end_the_run(
    pool: WorkerPool, tmp_path: Path, model: Any, strategy: str, ranks: int, options: Any, words: list[str] | None
) -> None:
    arguments = model, strategy, options, tmp_path, model is not Plateaued  # it saves at the end of the first epoch
    found = pool.run(fit_with_rates, ranks, *arguments, init=False, expect_errors=words is not None)
    if words is None:
        assert found == [12, 12]
    else:
        assert_refused(found, "RuntimeError", words)


class LooksAlone(LeNet):
    """One rank looks at what would be saved."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:
            assert self.trainer.strategy.lightning_module_state_dict().keys() == self.state_dict().keys()


def test_a_rank_may_ask_alone_for_the_weights_that_it_holds(pool: WorkerPool) -> None:
    options = {"stages": 1, "timeout": 20.0}
    pool.run(train, 2, LooksAlone, "sync", options, init=False, timeout=60)
