"""Loaders as the ranks see them: those that would give every replica the same samples, and samplers by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from lightning_parallel.loading.loaders import with_one_worker
from tests.strategies.failures import LIMIT, assert_refused
from tests.strategies.harness import complete, here, make_trainer
from tests.strategies.models import LeNet, Rows
from tools.workers.pool import WorkerPool
from tools.workers.worker import texts_of_warnings


class InWorker(IterableDataset[Any]):
    """Reads who it is, as datasets that share out files do."""

    def __iter__(self) -> Any:
        worker: Any = get_worker_info()
        return iter(range(8 * worker.num_workers))


def test_a_copy_with_one_worker_leaves_persistent_ones_to_their_loader() -> None:
    loader = DataLoader(InWorker(), num_workers=2, persistent_workers=True)
    own = iter(loader)
    first = next(own)
    assert [int(each) for each in with_one_worker(loader)] == [*range(8)]
    assert [int(first), *map(int, own)] == sorted([*range(16)] * 2) and loader.num_workers == 2


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(LeNet.samples())


def warnings_of(loader: str) -> list[str]:
    made = {
        "iterable": DataLoader(Endless(), batch_size=4),
        "own sampler": DataLoader(Rows(LeNet.samples()), batch_size=4, sampler=RandomSampler(LeNet.samples())),
        "distributed": LeNet.loader(),
    }
    trainer = make_trainer("sync", [], {"stages": 1}, max_epochs=1, use_distributed_sampler=loader != "own sampler")
    with texts_of_warnings() as told:
        trainer.fit(LeNet(), made[loader])
    return [text for text in told if "replicas" in text]


@pytest.mark.parametrize(("loader", "words"), [
    ("iterable", ["Endless", "layout.index('data')"]), ("own sampler", ["RandomSampler", "DistributedSampler"]),
    ("distributed", None),
])  # fmt: skip
def test_replicas_that_would_train_on_the_same_samples_are_warned_of(
    pool: WorkerPool, loader: str, words: list[str] | None
) -> None:
    told, other = pool.run(warnings_of, 2, loader, init=False)
    assert other == []
    assert len(told) == (words is not None)
    assert all(word in told[0] for word in words or [])


class ShortOnOne(IterableDataset[Any]):
    """Has one batch on the last rank, and all on the others. Nobody knows the length."""

    def __iter__(self) -> Any:
        return iter(LeNet.samples()[: 4 if dist.get_rank() else None])


class Overstated(ShortOnOne):
    def __len__(self) -> int:
        return len(LeNet.samples())


class OverstatedSampler(Overstated, Sampler[Any]):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return iter(range(4 if dist.get_rank() else len(self)))


def run_short(what: str, strategy: str, data: str, given: dict[str, Any]) -> int:
    options = {"stages": 1} if strategy == "sync" else {}
    made: dict[str, Any] = {
        "unknown": DataLoader(ShortOnOne(), batch_size=4),
        "overstated": DataLoader(Overstated(), batch_size=4),
        "sampler": DataLoader(Rows(LeNet.samples()), batch_size=4, sampler=OverstatedSampler()),
    }
    known = DataLoader(Rows(LeNet.samples()), batch_size=4)
    for kind in ("unknown", "overstated"):
        made[f"{kind} on one"] = made[kind] if rank_zero_only.rank else known
    trainer = make_trainer(strategy, [], options, max_epochs=1, use_distributed_sampler=False, **given)
    getattr(trainer, what)(Evaluated(), made[data])
    return trainer.global_step


class Evaluated(LeNet):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.loss(batch), sync_dist=True)

    validation_step = test_step


ENDS = "RuntimeError", ["One replica's loader ends with batch 0", "_batches=1"]


@pytest.mark.parametrize(("what", "strategy", "data", "given", "error"), [
    ("fit", "fsdp", "unknown", {}, ENDS),
    ("fit", "sync", "unknown", {"limit_train_batches": 3}, ENDS),
    ("fit", "fsdp", "sampler", {}, ENDS),
    ("validate", "fsdp", "unknown", {}, ENDS),
    ("test", "fsdp", "unknown", {"limit_test_batches": 3}, ENDS),
    ("predict", "fsdp", "overstated", {}, ENDS),
    ("fit", "sync", "overstated on one", {}, ENDS),
    ("fit", "fsdp", "unknown on one", {}, ("ValueError", ["has a length on some ranks", "of the same kind"])),
    ("validate", "fsdp", "unknown", {"limit_val_batches": 1}, None),
    ("fit", "fsdp", "sampler", {"max_steps": 1}, None),
])  # fmt: skip
def test_a_replica_whose_loader_ends_before_the_others_run_does_is_refused(
    pool: WorkerPool, what: str, strategy: str, data: str, given: dict[str, Any], error: tuple[str, list[str]] | None
) -> None:
    arguments, refused = (what, strategy, data, given), error is not None
    found = pool.run(run_short, 2, *arguments, init=False, expect_errors=refused, timeout=LIMIT)
    if error is None:
        assert found == [given.get("max_steps", 0)] * 2
    else:
        assert_refused(found, *error)


class OwnSampler(LeNet):
    """As under DDP: the sampler asks torch.distributed for the ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        alone = {} if dist.is_initialized() else {"num_replicas": 1, "rank": 0}
        data = Rows(self.samples())
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, **alone))


def trained(strategy: str) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    module = OwnSampler()
    make_trainer(strategy, [], {} if strategy == "single" else {"microbatches": 2}, max_epochs=2).fit(module)
    return {name: complete(parameter.detach()) for name, parameter in here(module).items()}


def test_samplers_that_hooks_make_see_replicas_as_ranks(pool: WorkerPool) -> None:
    (expected,) = pool.run(trained, 1, "single", init=False)
    for weights in pool.run(trained, 2, "sync", init=False):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)
