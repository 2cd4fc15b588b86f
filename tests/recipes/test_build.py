"""recipes/build.py: from a config to objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from recipes import build, record
from recipes.logs import ContinuedCSVLogger
from tests.recipes.runs import composed, trained
from tools.workers.pool import WorkerPool


def test_validation_falls_on_the_last_step() -> None:
    for steps in (1, 2, 4, 7, 40, 41, 200, 300):
        interval = build.validation_interval(steps, accumulate=1)
        assert interval is not None and steps % interval == 0 and steps // interval <= 4
    assert build.validation_interval(300, accumulate=2) == 150
    assert build.validation_interval(-1, accumulate=1) is None


def test_processes_take_turns_on_the_gpus_only_where_there_are_too_few() -> None:
    assert [device.index for device in build.shared_gpus(5, gpus=2)] == [0, 1, 0, 1, 0]
    assert build.shared_gpus(2, gpus=2) == build.shared_gpus(2, gpus=4) == build.shared_gpus(2, gpus=0) == []


def test_what_cannot_be_made_is_refused_with_the_setting() -> None:
    config = composed("strategy=single")
    config["model"] = {"_target_": "torch.nn.ReLU"}
    config["data"] = {"_target_": "torch.nn.ReLU"}
    with pytest.raises(ValueError, match="model._target_=torch.nn.ReLU is not a LightningModule"):
        build.model(config)
    with pytest.raises(ValueError, match="data._target_=torch.nn.ReLU is not a LightningDataModule"):
        build.data(config)
    config["strategy"] = {"_target_": "lightning_parallel.PipelineStrategy", "schedule": "naive", "microbatches": 8}
    with pytest.raises(ValueError, match=r"^microbatches=8: the naive schedule has one"):  # as it is, without Hydra's
        build.strategy(config)
    config = composed("model=mlp", "data=digits", "optimizer.betas=[1,1]")
    with pytest.raises(ValueError, match="^optimizer: Invalid beta"):
        build.model(config).configure_optimizers()


def test_the_trainer_has_what_the_groups_say(tmp_path: Any) -> None:
    config = composed("strategy=single", "logger=both", f"paths.log_dir={tmp_path}", "trainer.max_steps=40")
    trainer = build.trainer(config)
    assert trainer.max_steps == 40 and trainer.val_check_interval == 10
    assert trainer.check_val_every_n_epoch is None
    assert [type(logger) for logger in trainer.loggers] == [ContinuedCSVLogger, TensorBoardLogger]
    assert {ModelCheckpoint, TQDMProgressBar} <= {type(callback) for callback in trainer.callbacks}
    bare = build.trainer(
        composed("strategy=single", "logger=none", "callbacks=none", "trainer.enable_progress_bar=false")
    )
    assert not bare.loggers and not bare.checkpoint_callbacks and bare.progress_bar_callback is None
    assert build.strategy(config) == "auto"


def test_a_run_begins_with_the_weights_of_a_checkpoint_of_the_same_model(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.ckpt")
    one, other = (build.model(composed("model=mlp", "data=digits")) for _ in range(2))
    torch.save({"state_dict": one.state_dict()}, path)
    build.begin_with(other, path)
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    with pytest.raises(ValueError, match=r"^init_from=.*weights.ckpt: its weights are those of another model: .*more"):
        build.begin_with(build.model(composed("model=mlp", "data=digits", "model.width=8")), path)


def test_the_learning_rate_is_logged_where_there_is_a_logger() -> None:
    for words, logged in (([], True), (["logger=none"], False), (["logger.csv=null"], False)):
        found = build.callbacks(composed(*words))
        assert any(isinstance(callback, LearningRateMonitor) for callback in found) is logged


class Nested(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.ModuleList([torch.nn.Linear(4, 4)]) for _ in range(2))


def compiled(module: torch.nn.Module) -> list[str]:
    # torch has no public name that tells
    return [name for name, part in module.named_modules() if part._compiled_call_impl is not None]


def test_layers_of_lists_are_compiled_in_place_each_once() -> None:
    module, names = Nested(), [*Nested().state_dict()]
    build.compile_layers(module)
    assert compiled(module) == ["blocks.0.0", "blocks.1.0"] and [*module.state_dict()] == names
    with pytest.raises(ValueError, match="compile=true: the model has no nn.ModuleList"):
        build.compile_layers(build.model(composed("model=lenet", "data=digits")))


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "pipeline_zbv"])
def test_compiled_layers_have_the_numbers_of_the_others(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    small = ["model.layers=2", "model.width=32", "model.dropout=0", "data.context=32", "data.batch_size=8"]
    small += ["trainer.precision=64-true", "trainer.max_steps=3", "trainer.limit_val_batches=2"]
    plain, other = (
        record.read_metrics(trained(pool, tmp_path / name, *small, f"strategy={chosen}", f"compile={name}"))
        for name, chosen in (("false", "single"), ("true", strategy))
    )
    assert other["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-12)
