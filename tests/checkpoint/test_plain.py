"""One process reads what any layout has saved, under all names, and converts it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.checkpoint import read_full, read_plain
from tests.strategies.harness import largest_difference
from tools.workers.pool import WorkerPool


class Tied(L.LightningModule):
    """Weights with two names, a layer with two names, and buffers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.again = self.norm
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.head(self.middle(self.norm(self.embed(batch)))), batch)

    test_step = training_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def make_trainer(strategy: Any, devices: int, *callbacks: Callback) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, callbacks=[*callbacks], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def loader() -> DataLoader:
    return DataLoader(torch.arange(16) % 8, 4)  # type: ignore[arg-type]


def save(path: Path, weights_only: bool = False) -> dict[str, Any]:
    """Train in two stages and save; the tensors that this rank holds, under all their names."""
    module = Tied()
    trainer = make_trainer(lp.PipelineStrategy(layers=["embed", "norm", "middle", "head"], microbatches=1), 2)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path, weights_only=weights_only)
    held = trainer.strategy.local_model  # type: ignore[attr-defined]
    return {name: tensor.detach().clone() for name, tensor in {**held.parameters, **held.buffers()}.items()}


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of two stages, and what they held."""
    path = tmp_path_factory.mktemp("plain") / "last.ckpt"
    last, first = pool.run(save, 2, path, init=False)
    return path, first | last


def test_weights_have_all_their_names_in_each_kind(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path, held = saved
    torch.save(read_plain(path), tmp_path / "plain.ckpt")
    for kind in (path, tmp_path / "plain.ckpt"):
        full = read_full(kind)
        assert full.keys() == Tied().state_dict().keys()
        assert largest_difference({name: full[name] for name in held}, held) == 0
        assert torch.equal(full["head.weight"], full["embed.weight"])
        assert torch.equal(full["again.running_mean"], full["norm.running_mean"])
        Tied().load_state_dict(full)


def test_load_from_checkpoint_opens_a_directory(saved: tuple[Path, dict[str, Any]]) -> None:
    path, held = saved
    module = Tied.load_from_checkpoint(path)
    assert module.hparams["width"] == 6
    assert largest_difference({name: module.state_dict()[name] for name in held}, held) == 0
    assert Tied.load_from_checkpoint(str(path), map_location="cpu").device.type == "cpu"


def test_lightning_s_own_strategy_resumes_and_tests_a_directory(saved: tuple[Path, dict[str, Any]]) -> None:
    path, held = saved
    module = Tied()
    trainer = make_trainer("auto", 1)
    trainer.fit(module, loader(), ckpt_path=path)  # nothing is left to be trained
    assert trainer.global_step == 4 and trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.005)
    assert largest_difference({name: module.state_dict()[name] for name in held}, held) == 0
    steps = [state["step"].item() for state in trainer.optimizers[0].state.values()]
    assert steps == [4.0] * len([*module.parameters()])
    other = Tied()
    trainer.test(other, loader(), ckpt_path=path, verbose=False)
    assert largest_difference({name: other.state_dict()[name] for name in held}, held) == 0


def test_a_file_replaces_a_directory(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Lightning would write it into the directory, where nobody looks for it."""
    shutil.copytree(saved[0], tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").is_dir()
    module = Tied()
    trainer = make_trainer("auto", 1, lp.ExactResume())
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").is_file()
    assert largest_difference(read_full(tmp_path / "last.ckpt"), module.state_dict()) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt"]


def test_weights_alone_have_no_optimizer(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(save, 2, tmp_path / "weights.ckpt", weights_only=True, init=False)
    assert not {"optimizer_states", "lr_schedulers"} & read_plain(tmp_path / "weights.ckpt").keys()


def test_nothing_there_is_said(tmp_path: Path) -> None:
    for read in (read_full, read_plain):
        with pytest.raises(ValueError, match="There is no checkpoint at .*directory with .metadata and trainer.pt"):
            read(tmp_path / "last.ckpt")
