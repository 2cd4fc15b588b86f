"""A run that is resumed is the run, under any layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_parallel.checkpoint import PlainOnDemand, convert, read_full
from tests.checkpoint.moved import MOVED, Block, Moved, Runs, assert_same
from tests.strategies.failures import assert_refused
from tests.strategies.harness import ALL, here, largest_difference, make_trainer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool


def orders_saved(folder: Path) -> list[list[str]]:
    """The optimizer's parameters in checkpoints after training, and after a test that followed it."""
    module = ALL["LeNet"]()
    trainer = make_trainer("sync", [], {})
    trainer.fit(module, module.loader())
    trainer.save_checkpoint(folder / "fitted")
    module.test_step = module.training_step
    trainer.test(module, module.loader(), verbose=False)
    trainer.save_checkpoint(folder / "tested")
    return [[*PlainOnDemand(folder / name).saved["param_groups"][0][0]["params"]] for name in ("fitted", "tested")]


def test_a_checkpoint_after_a_test_has_the_parameters_in_the_model_s_order(pool: WorkerPool, tmp_path: Path) -> None:
    expected = [name for name, _ in ALL["LeNet"]().named_parameters()]
    for fitted, tested in pool.run(orders_saved, 2, tmp_path, init=False):
        assert fitted == tested == expected


class TwoGroups(ALL["LeNet"]):  # type: ignore[misc]
    """What its class has become once a callback has added a group to its optimizer."""

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.AdamW([{"params": [first]}, {"params": others}])


def resume_without_a_group(folder: Path) -> None:
    for kind, resume in ((TwoGroups, None), (ALL["LeNet"], folder / "epoch=0.ckpt")):
        keeper = ModelCheckpoint(folder, "{epoch}")
        trainer = make_trainer("sync", [keeper], {}, max_epochs=1 if resume is None else 2, enable_checkpointing=True)
        trainer.fit(kind(), kind.loader(), ckpt_path=resume)
        os.environ["WORLD_SIZE"] = "2"  # a Trainer that ends deletes it


def test_other_parameter_groups_are_refused_with_the_fix(pool: WorkerPool, tmp_path: Path) -> None:
    failures = pool.run(resume_without_a_group, 2, tmp_path, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["has 2 parameter groups, but configure_optimizers made 1", "callback"])


def take(path: Path, content: dict[str, Any]) -> None:
    """Resume from a plain checkpoint, which rank 1 doesn't see at once; nothing may have changed if it is refused."""
    module = ALL["Blocks"]()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if torch.distributed.get_rank() == 0:
        given = {name: tensor for name, tensor in (before | content).items() if tensor is not None}
        torch.save({"state_dict": given, "pytorch-lightning_version": "2.6.6", "loops": {}}, path)
    torch.distributed.barrier()
    is_file, sees = Path.is_file, torch.distributed.get_rank() == 0
    lag = mock.patch.object(Path, "is_file", lambda file: is_file(file) and (sees or file != path))
    try:
        with lag:
            make_trainer("sync", [], {"microbatches": 2}).fit(module, ALL["Blocks"].loader(), ckpt_path=path)
    finally:
        assert all(torch.equal(tensor, before[name]) for name, tensor in here(module).items())


def test_a_plain_checkpoint_of_another_model_is_refused_before_anything_changes(
    pool: WorkerPool, tmp_path: Path
) -> None:
    first, *_, last = ALL["Blocks"]().state_dict()
    content = {first: torch.zeros(1), last: None, "other.weight": torch.zeros(1)}
    failures = pool.run(take, 2, tmp_path / "plain.ckpt", content, expect_errors=True)
    said = [f"{first} has shape (1,) in it and", f"{last} is missing in it", "other.weight is in no rank's model"]
    assert_refused(failures, "ValueError", ["plain.ckpt does not fit the model", *said])


def save_unrun(strategy: str, path: Path) -> None:
    module = ALL["LeNet"]()
    trainer = make_trainer(strategy, [], {})
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    if trainer.is_global_zero:
        saved = torch.load(path, weights_only=True)["state_dict"]
        assert saved.keys() == module.state_dict().keys()


@pytest.mark.parametrize(("strategy", "ranks"), [("sync", 1), ("fsdp", 2)])
def test_a_module_that_has_not_run_is_saved_as_by_lightning(
    pool: WorkerPool, tmp_path: Path, strategy: str, ranks: int
) -> None:
    pool.run(save_unrun, ranks, strategy, tmp_path / "begin.ckpt", init=False)


# -- under another layout, in the middle of an epoch -------------------------------------------------------------

SYNCHRONOUS = [name for name in MOVED if name != "async2"]
OFTEN = ["single", "ddp2", "fsdp2 x tp2"]  # targets in every run of the tests


class CountingBlock(Block):
    """It keeps something that is neither a parameter nor a buffer."""

    counted = 0.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.counted)

    def set_extra_state(self, state: Tensor) -> None:
        self.counted = state.item()


class Counting(Moved):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CountingBlock(), CountingBlock()

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.first.counted += 1
        self.second.counted += 2


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("moves"), Counting)


def converted(path: Path) -> Path:
    """A directory as a plain file."""
    other = path.with_name(f"{path.stem} converted.ckpt")
    if not other.exists():
        convert(path, other)
    return other


@pytest.mark.parametrize("source", ["tp2 x pp2", *thorough(*(name for name in MOVED if name != "tp2 x pp2"))])
@pytest.mark.parametrize("target", [*OFTEN, *thorough(*(name for name in SYNCHRONOUS if name not in OFTEN))])
def test_a_run_goes_on_under_another_layout(runs: Runs, source: str, target: str) -> None:
    middle = runs.run("none", source)[0]
    # A synchronous run has the numbers of one process. One that began asynchronously goes on as one process does from
    # there; that process reads the checkpoint's other kind.
    expected = runs.run("none", "single", None if source in SYNCHRONOUS else converted(middle))
    end = runs.run("none", target, middle)[1]
    assert {"first._extra_state", "second._extra_state"} <= read_full(end).keys()
    assert_same(end, expected[1])


@pytest.mark.parametrize("source", ["ddp2", "async2", *thorough(*(s for s in SYNCHRONOUS if s != "ddp2"))])
def test_an_asynchronous_run_goes_on_from_another_layout(runs: Runs, source: str) -> None:
    middle, end, _ = runs.run("none", source)
    first = runs.run("none", "single")[0] if source in SYNCHRONOUS else converted(middle)
    found = runs.run("none", "async2", middle)[1]
    assert_same(found, runs.run("none", "async2", first)[1])
    if source == "async2":
        assert largest_difference(read_full(found), read_full(end)) == 0
