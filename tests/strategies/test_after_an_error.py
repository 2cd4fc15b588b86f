"""A script may go on to the next Trainer in the same processes, also after an error: the last one leaves nothing but
its module."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn.modules import module as modules

import lightning_parallel as lp
from lightning_parallel.ranks.collectives import PeerLostError
from tests.strategies.harness import Report, joined, largest_difference, make_trainer, train
from tests.strategies.shardable import Mixed
from tests.thorough import thorough

TIMEOUT = 1000.0  # seconds: far above the pool's, which is what a rank that waits for another one meets


class Fails(Mixed):
    """In the second batch, on all ranks or on one."""

    ranks: Collection[int] = range(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and rank_zero_only.rank in self.ranks:
            raise ValueError("no luck")
        return super().training_step(batch, batch_idx)


FailsOnFirst = type("FailsOnFirst", (Fails,), {"ranks": (0,)})


@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 1, "data_parallel": 2}], ids=["shards", "replicas"])
def test_a_rank_that_fails_ends_the_others(launch: Any, options: dict[str, Any]) -> None:
    failed, other = launch(train, 2, FailsOnFirst, "tensor", options, expect_errors=True, timeout=60)
    assert "ValueError: no luck" in str(failed)
    assert re.search("one of them stopped|by peer", str(other))  # at once: the pool's timeout is far below gloo's


REPLICAS = {"stages": 1, "data_parallel": 2, "timeout": TIMEOUT}


class Keeps(Callback):
    """A user's own callback, which Lightning doesn't put last."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "last.ckpt"

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def fail_saving(failing: int, folder: Path, by_own: bool) -> None:
    keeper = ModelCheckpoint(folder, filename="last", save_on_exception=True)
    callbacks = [Keeps(folder), lp.ExactResume()] if by_own else [keeper]
    kind = type("FailsOnOne", (Fails,), {"ranks": (failing,)})
    with pytest.raises((ValueError, PeerLostError), match="no luck|broke"):
        make_trainer("sync", callbacks, REPLICAS, enable_checkpointing=not by_own).fit(kind(), Mixed.loader())


def fail_and_save(failing: int, folder: Path, by_own: bool) -> None:
    fail_saving(failing, folder, by_own)
    gc.collect()  # frees the Trainer, whose open connections the other rank would wait for


def weights_of_one_step() -> dict[str, Tensor]:
    module = Mixed()
    make_trainer("sync", [], REPLICAS, max_steps=1).fit(module, Mixed.loader())
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("failing", "by_own"), [(1, False), (0, True), *thorough((0, False))])
def test_the_first_of_replicas_saves_alone_after_an_error(
    launch: Any, failing: int, by_own: bool, tmp_path: Path
) -> None:
    """Its own, or another replica's, without which it can't go on."""
    launch(fail_and_save, 2, failing, tmp_path, by_own, timeout=60)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 1
    for weights in launch(weights_of_one_step, 2):
        assert largest_difference(weights, {name: saved["state_dict"][name] for name in weights}) == 0


def train_after(first: str, options: dict[str, Any], second: str) -> Report:
    # A stage that is ahead fails first. Nothing holds its model, so its connections close, with what it has sent last.
    with pytest.raises((ValueError, PeerLostError), match="no luck|broke"):
        make_trainer(first, [], {**options, "timeout": TIMEOUT}).fit(Fails(), Fails.loader())
    return train("Mixed", second, max_epochs=1)


@pytest.mark.parametrize(("first", "options", "second"), [
    ("async", {}, "sync"),
    *thorough(("fsdp", {}, "fsdp"), ("sync", {}, "async"), ("async", {"stages": 2, "data_parallel": 2}, "sync")),
])  # fmt: skip
def test_the_next_trainer_has_the_numbers_that_it_has_alone(
    launch: Any, first: str, options: dict[str, Any], second: str
) -> None:
    ranks = 2 * options.get("data_parallel", 1)
    after = launch(train_after, ranks, first, options, second)
    alone = launch(train, ranks, "Mixed", second, max_epochs=1)
    assert [report.losses for report in after] == [report.losses for report in alone]
    weights = [joined(reports, "weights") for reports in (after, alone)]
    assert largest_difference(*weights) == 0


# -- what is left ---------------------------------------------------------------------------------------------------

GLOBAL_HOOKS = [name for name in vars(modules) if name.startswith("_global_") and name.endswith("hooks")]


def fit(strategy: str) -> None:
    """A Trainer with another strategy may be given the same precision plugin after it."""
    torch.set_default_dtype(torch.float32)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # a Trainer that ends deletes it
    given = {"devices": 2} if strategy == "data" else {}
    plugin = None if strategy in ("async", "data") else MixedPrecision("16-mixed", "cpu")
    scaler, plugins = plugin and plugin.scaler, [plugin] if plugin else []
    trainer = make_trainer(
        strategy, [], {}, max_epochs=1, limit_train_batches=1, gradient_clip_val=1.0, plugins=plugins, **given
    )
    module = Mixed()
    trainer.fit(module, Mixed.loader(), Mixed.loader())
    assert not [name for name, value in vars(trainer.precision_plugin).items() if callable(value)]
    assert plugin is None or plugin.scaler is scaler
    if strategy == "data":
        assert not {"forward", "log", "_is_replica"} & {name for each in module.modules() for name in vars(each)}


def left() -> dict[str, Any]:
    """What is there of what Trainers make."""
    gc.collect()
    kinds = Counter(type(each).__module__ + "." + type(each).__name__ for each in gc.get_objects())
    return {
        "threads": threading.active_count() + len(os.listdir("/proc/self/task")),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "hooks": {name: len(getattr(modules, name)) for name in GLOBAL_HOOKS},
        "patched": {k.__name__: sorted(vars(k)) for k in (L.Trainer, L.LightningModule, torch.nn.Module, torch.Tensor)},
        "ours": {name: count for name, count in kinds.items() if name.startswith("lightning_parallel.")},
        "trainers": kinds["lightning.pytorch.trainer.trainer.Trainer"],
        "layers": kinds["torch.nn.modules.linear.Linear"],
        "files": len(os.listdir("/proc/self/fd")),
    }


def what_many_leave(strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    fit(strategy)
    first = left()
    fit(strategy)
    return first, left()


@pytest.mark.parametrize(("strategy", "ranks"), [("sync", 2), ("async", 2), ("tensor", 2), ("fsdp", 2), ("data", 1)])
def test_each_trainer_leaves_as_much_as_the_one_before(launch: Any, strategy: str, ranks: int) -> None:
    for first, last in launch(what_many_leave, ranks, strategy):
        assert first == last
