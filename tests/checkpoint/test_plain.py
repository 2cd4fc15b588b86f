"""One process reads what any layout has saved, under all names, and converts it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.checkpoint import convert, format, read_full, read_plain
from lightning_parallel.checkpoint.keys import OptimizerState
from tests.strategies.harness import largest_difference, make_trainer
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


def loader() -> DataLoader:
    return DataLoader(torch.arange(16) % 8, 4)  # type: ignore[arg-type]


def save(path: Path) -> dict[str, Any]:
    """Train in two stages and save; the tensors that this rank holds, under all their names."""
    module = Tied()
    trainer = make_trainer("sync", [], {"layers": ["embed", "norm", "middle", "head"], "microbatches": 1}, max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
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
    convert(path, tmp_path / "plain.ckpt")
    convert(path, tmp_path / "weights.safetensors")
    for kind in (path, tmp_path / "plain.ckpt", tmp_path / "weights.safetensors"):
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
    trainer = make_trainer("single", [], {}, max_epochs=1)
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
    trainer = make_trainer("single", [lp.ExactResume()], {}, max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").is_file()
    assert largest_difference(read_full(tmp_path / "last.ckpt"), module.state_dict()) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt"]


def test_nothing_there_is_said(tmp_path: Path) -> None:
    for read in (read_full, read_plain):
        with pytest.raises(ValueError, match="There is no checkpoint at .*directory with .metadata and trainer.pt"):
            read(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="There is no file"):
        read_full(tmp_path / "last.safetensors")


# -- what is converted is what it was -----------------------------------------------------------------------------

WEIGHTS = {"a": torch.randn(20, 30), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(3)}


def write(path: Path) -> Path:
    """The checkpoint of one process that has two optimizers."""
    states = [
        OptimizerState(
            {"b": {"step": torch.tensor(5.0)}, "a": {"exp_avg": torch.ones(20, 30), "kept": 3}},
            [{"lr": 0.1, "params": ["b"]}, {"lr": 0.2, "params": ["a"]}],
        ),
        OptimizerState({}, [{"lr": 0.3, "params": ["a"]}]),
    ]
    format.save(
        path, model=WEIGHTS, optimizers=states, trainer={"epoch": 3, "lr_schedulers": [{}]}, aliases={"d": "a"},
        rank_state={"torch": torch.arange(3)}, coordinate="pp0.dp0.tp0",
    )  # fmt: skip
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write(tmp_path / "last.ckpt")


def test_a_directory_becomes_what_torch_opens(directory: Path, tmp_path: Path) -> None:
    convert(directory, tmp_path / "plain.ckpt")
    plain = torch.load(tmp_path / "plain.ckpt")
    assert plain["epoch"] == 3 and plain["state_dict"].keys() == {"a", "b", "c", "d"}
    first, second = plain["optimizer_states"]
    assert first["param_groups"] == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    assert first["state"][1]["kept"] == 3 and first["state"][0]["step"] == 5 and second["state"] == {}


def test_weights_become_safetensors_and_come_back(directory: Path, tmp_path: Path) -> None:
    convert(directory, tmp_path / "weights.safetensors")
    convert(tmp_path / "weights.safetensors", tmp_path / "again.ckpt")
    for name in ("weights.safetensors", "again.ckpt"):
        assert largest_difference(read_full(tmp_path / name), {**WEIGHTS, "d": WEIGHTS["a"]}) == 0
    assert read_plain(tmp_path / "again.ckpt").keys() == {"state_dict"}


def test_a_file_with_other_objects_gives_its_weights_to_those_who_trust_it(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2)}
    torch.save({"state_dict": weights, "hyper_parameters": {"path": Path("here")}}, tmp_path / "it.ckpt")
    target = tmp_path / "weights.safetensors"
    with pytest.raises(ValueError, match="weights_only=False"):
        convert(tmp_path / "it.ckpt", target)
    convert(tmp_path / "it.ckpt", target, weights_only=False)
    assert largest_difference(read_full(target), weights) == 0


def test_a_damaged_source_leaves_the_target_alone(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.ckpt").write_text("before")
    (tmp_path / "cut.safetensors").write_text("cut")
    (directory / "__0_0.distcp").unlink()
    for source in (directory, tmp_path / "cut.safetensors"):
        with pytest.raises(ValueError, match="is damaged"):
            convert(source, tmp_path / "plain.ckpt")
    assert (tmp_path / "plain.ckpt").read_text() == "before"


def test_a_file_of_bare_weights_stays_what_it_is(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2)}
    torch.save(weights, tmp_path / "it.ckpt")
    convert(tmp_path / "it.ckpt", tmp_path / "again.ckpt")
    assert largest_difference(read_full(tmp_path / "again.ckpt"), weights) == 0
