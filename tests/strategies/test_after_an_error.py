"""A script that catches an error of one Trainer can go on to the next one, in the processes that Lightning launched."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_parallel.ranks.collectives import PeerLostError
from tests.pool import WorkerPool
from tests.strategies.harness import Report, Witness, joined, largest_difference, make_trainer, train
from tests.strategies.shardable import Mixed
from tests.thorough import thorough

SCRIPT = """
import json, os, sys
os.environ["WORLD_SIZE"] = "2"  # make_trainer takes it for the number of devices
from tests.strategies.test_after_an_error import go_on
rank, caught, losses = go_on()
with open(os.path.join(sys.argv[1], f"{rank}.json"), "w") as file:
    json.dump([caught, losses], file)
"""


TIMEOUT = 100.0  # seconds


class Fails(Mixed):
    """In the second batch, on all ranks or on one."""

    ranks: Collection[int] = range(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and rank_zero_only.rank in self.ranks:
            raise ValueError("no luck")
        return super().training_step(batch, batch_idx)


class FailsOnOne(Fails):
    ranks = (1,)


class FailsOnFirst(Fails):
    ranks = (0,)


REPLICAS = {"stages": 1, "data_parallel": 2, "timeout": TIMEOUT}


def fail_saving(kind: type[Fails], folder: Path) -> None:
    keeper = ModelCheckpoint(folder, filename="last", save_on_exception=True)
    with pytest.raises((ValueError, PeerLostError), match="no luck|broke"):
        make_trainer("sync", [keeper], REPLICAS, enable_checkpointing=True).fit(kind(), kind.loader())


def fail_and_save(kind: type[Fails], folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    begin = time.monotonic()
    fail_saving(kind, folder)
    gc.collect()  # the Trainer, or the other rank would wait
    assert time.monotonic() - begin < TIMEOUT / 2


def weights_of_one_step() -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    module = Mixed()
    make_trainer("sync", [], REPLICAS, max_steps=1).fit(module, Mixed.loader())
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("kind", [FailsOnFirst, *thorough(FailsOnOne)])
def test_the_first_of_replicas_saves_alone_after_an_error(pool: WorkerPool, kind: type[Fails], tmp_path: Path) -> None:
    pool.run(fail_and_save, 2, kind, tmp_path, init=False)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 1
    for weights in pool.run(weights_of_one_step, 2, init=False):
        assert largest_difference(weights, {name: saved["state_dict"][name] for name in weights}) == 0


def go_on() -> tuple[int, list[str], list[float]]:
    """Two Trainers fail on all ranks, a third one trains: this rank, what it caught, and the losses."""
    torch.set_default_dtype(torch.float64)
    caught = []
    for kind, strategy in ((Fails, "sync"), (Fails, "tensor")):
        os.environ["WORLD_SIZE"] = "2"  # a Trainer that ends deletes it
        try:
            make_trainer(strategy, [], {}).fit(kind(), kind.loader())
        except (ValueError, RuntimeError) as error:
            caught.append("lost" if isinstance(error, RuntimeError) else str(error))
    os.environ["WORLD_SIZE"] = "2"
    report = Report()
    trainer = make_trainer("tensor", [Witness(report)], {}, max_epochs=1)
    trainer.fit(Mixed(), Mixed.loader())
    return trainer.global_rank, caught, report.losses


@pytest.mark.thorough  # a pool's processes show the same in `make test`
def test_a_script_goes_on_after_errors(tmp_path: Path, pool: WorkerPool) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "RES_OPTIONS") if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)], env=environment, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    [whole] = pool.run(train, 1, "Mixed", init=False, max_epochs=1)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    # The rank that fails first closes its connections, which the other one may notice before it fails itself.
    for caught in zip(*(caught for caught, _ in results), strict=True):
        assert "no luck" in caught and set(caught) <= {"no luck", "lost"}
    for _, losses in results:
        assert losses == pytest.approx(whole.losses, rel=0, abs=1e-12)


def train_after(first: str, options: dict[str, Any], second: str) -> Report:
    # A stage that is ahead fails first. Nothing holds its model, so its connections close, with what it has sent last.
    begin = time.monotonic()
    with pytest.raises((ValueError, PeerLostError), match="no luck|broke"):
        make_trainer(first, [], {**options, "timeout": TIMEOUT}).fit(Fails(), Fails.loader())
    assert time.monotonic() - begin < TIMEOUT / 2
    return train("Mixed", second, max_epochs=1)


@pytest.mark.parametrize(
    ("first", "options", "second"),
    [
        ("async", {}, "sync"),
        *thorough(
            ("fsdp", {}, "fsdp"),
            ("sync", {}, "async"),
            ("async", {"stages": 2, "data_parallel": 2}, "sync"),
        ),
    ],
)
def test_the_next_trainer_has_the_numbers_that_it_has_alone(
    pool: WorkerPool, first: str, options: dict[str, Any], second: str
) -> None:
    ranks = 2 * options.get("data_parallel", 1)
    after = pool.run(train_after, ranks, first, options, second, init=False)
    alone = pool.run(train, ranks, "Mixed", second, max_epochs=1, init=False)
    assert [report.losses for report in after] == [report.losses for report in alone]
    weights = [joined(reports, "weights") for reports in (after, alone)]
    assert largest_difference(*weights) == 0
