"""What Trainers leave in the process when they have ended: nothing but the module."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.module import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.modules import module as modules

from tests.strategies.harness import ALL, make_trainer

GLOBAL_HOOKS = [name for name in vars(modules) if name.startswith("_global_") and name.endswith("hooks")]


def fit(strategy: str) -> None:
    """A Trainer with another strategy may be given the same precision plugin after it."""
    torch.set_default_dtype(torch.float32)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # a Trainer that ends deletes it
    kind, given = ALL["Mixed"], {"devices": 2} if strategy == "data" else {}
    plugin = None if strategy in ("async", "data") else MixedPrecision("16-mixed", "cpu")
    scaler, plugins = plugin and plugin.scaler, [plugin] if plugin else []
    trainer = make_trainer(
        strategy, [], {}, max_epochs=1, limit_train_batches=1, gradient_clip_val=1.0, plugins=plugins, **given
    )
    module = kind()
    trainer.fit(module, kind.loader(), kind.loader())
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
        "patched": {k.__name__: sorted(vars(k)) for k in (pl.Trainer, LightningModule, torch.nn.Module, torch.Tensor)},
        "ours": {name: count for name, count in kinds.items() if name.startswith("lightning_parallel.")},
        "trainers": kinds["lightning.pytorch.trainer.trainer.Trainer"],
        "layers": kinds["torch.nn.modules.linear.Linear"],
        "files": len(os.listdir("/proc/self/fd")),
    }


def what_many_leave(strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    for _ in range(2):
        fit(strategy)
    first = left()
    fit(strategy)
    return first, left()


@pytest.mark.parametrize(("strategy", "ranks"), [("sync", 2), ("async", 2), ("tensor", 2), ("fsdp", 2), ("data", 1)])
def test_each_trainer_leaves_as_much_as_the_one_before(launch: Any, strategy: str, ranks: int) -> None:
    for first, last in launch(what_many_leave, ranks, strategy):
        assert first == last
