"""A run that is resumed is the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel.checkpoint import is_checkpoint, load, read_full
from tests.pool import WorkerPool
from tests.strategies.failures import assert_refused
from tests.strategies.harness import (
    ALL,
    STRATEGIES,
    Report,
    complete,
    here,
    joined,
    largest_difference,
    make_trainer,
    spoil,
)
from tests.thorough import thorough

EPOCHS = 4


def fit(
    model: str,
    strategy: str,
    options: dict[str, Any],
    stages: int,
    directory: Path,
    resume: Path | None = None,
    **trainer_options: Any,
) -> tuple[Report, str, float]:
    """Train with a checkpoint an epoch. The model is made with other weights when it is to be resumed."""
    torch.set_default_dtype(torch.float64)
    module = ALL[model]()
    if resume is not None:
        spoil(module)
    keeper = ModelCheckpoint(directory, "{epoch}", monitor="val_loss", save_top_k=-1, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=stages, max_epochs=EPOCHS, logger=False, callbacks=[keeper], num_sanity_val_steps=0,
        strategy=STRATEGIES[strategy](**options) if strategy in STRATEGIES else "auto",
        enable_progress_bar=False, enable_model_summary=False, **trainer_options,
    )  # fmt: skip
    torch.manual_seed(11)
    trainer.fit(module, ALL[model].loader(), ALL[model].loader(), ckpt_path=resume)
    report = Report(weights={name: complete(p.detach()) for name, p in here(module).items()})
    report.shards = trainer.strategy.local_model.shards if strategy in STRATEGIES else {}  # type: ignore[attr-defined]
    return report, keeper.best_model_path, float(trainer.callback_metrics.get("val_loss", torch.nan))


Results = list[tuple[Report, str, float]]
Trained = Callable[..., tuple[Results, Path]]


@pytest.fixture(scope="module")
def trained(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a whole run gave on each rank, and the folder of its checkpoints. Tests share it: they only read."""
    done: dict[str, tuple[Results, Path]] = {}

    def train(ranks: int, model: str, strategy: str, options: dict[str, Any], **trainer_options: Any) -> Any:
        key = repr((ranks, model, strategy, options, trainer_options))
        if key not in done:
            folder = tmp_path_factory.mktemp("trained")
            results = pool.run(fit, ranks, model, strategy, options, ranks, folder, init=False, **trainer_options)
            done[key] = results, folder
        return done[key]

    return train


@pytest.mark.parametrize(("model", "strategy", "options"), [
    ("GPT2", "sync", {"microbatches": 4}),
    ("Blocks", "async", {"microbatches": 2}),
    *thorough(
        ("Blocks", "sync", {"schedule": "1f1b", "microbatches": 2}),
        ("Llama", "async", {"microbatches": 1}),
    ),
])  # fmt: skip
def test_a_resumed_run_is_the_run_to_the_bit(
    pool: WorkerPool, trained: Trained, tmp_path: Path, model: str, strategy: str, options: dict[str, Any]
) -> None:
    whole, folder = trained(3, model, strategy, options)
    resumed = pool.run(fit, 3, model, strategy, options, 3, tmp_path, folder / "epoch=1.ckpt", init=False)
    for (a, best_a, loss_a), (b, best_b, loss_b) in zip(whole, resumed, strict=True):
        assert largest_difference(a.weights, b.weights) == 0
        assert loss_a == loss_b
        assert Path(best_a).name == Path(best_b).name
    assert len({best for _, best, _ in whole}) == 1


@pytest.mark.parametrize("stages", [2, *thorough(1, 4)])
def test_a_checkpoint_continues_under_another_number_of_stages(
    pool: WorkerPool, trained: Trained, tmp_path: Path, stages: int
) -> None:
    options = {"microbatches": 2}
    whole, folder = trained(3, "GPT2", "sync", options, gradient_clip_val=0.5)
    saved = folder / "epoch=1.ckpt"
    resumed = pool.run(fit, stages, "GPT2", "sync", options, stages, tmp_path, saved, init=False, gradient_clip_val=0.5)
    weights = [joined([report for report, _, _ in run], "weights") for run in (whole, resumed)]
    assert largest_difference(*weights) < 1e-12


@pytest.mark.parametrize(("strategy", "stages"), [("sync", 3), *thorough(("sync", 2))])
def test_a_plain_checkpoint_of_one_process_continues_in_a_pipeline(
    pool: WorkerPool, trained: Trained, tmp_path: Path, strategy: str, stages: int
) -> None:
    [(whole, _, loss)], folder = trained(1, "Blocks", "single", {})
    resumed = pool.run(fit, stages, "Blocks", strategy, {}, stages, tmp_path, folder / "epoch=1.ckpt", init=False)
    assert largest_difference(joined([report for report, _, _ in resumed], "weights"), whole.weights) < 1e-12
    assert resumed[0][2] == pytest.approx(loss, rel=0, abs=1e-12)


@pytest.mark.parametrize("sequence_parallel", [True, *thorough(False)])
def test_a_resumed_run_of_shards_is_the_run_to_the_bit(
    pool: WorkerPool, trained: Trained, tmp_path: Path, sequence_parallel: bool
) -> None:
    options = {"sequence_parallel": sequence_parallel}
    whole, folder = trained(2, "DroppingGPT2", "tensor", options)
    resumed = pool.run(fit, 2, "DroppingGPT2", "tensor", options, 2, tmp_path, folder / "epoch=1.ckpt", init=False)
    for (a, _, loss_a), (b, _, loss_b) in zip(whole, resumed, strict=True):
        assert largest_difference(a.weights, b.weights) == 0
        assert loss_a == loss_b


@pytest.mark.parametrize(("strategy", "ranks", "options"), [
    ("sync", 3, {"schedule": "1f1b"}),
    *thorough(("tensor", 3, {}), ("sync", 1, {}), ("sync", 4, {"tensor_parallel": 2, "microbatches": 2})),
])  # fmt: skip
def test_shards_continue_under_another_layout(
    pool: WorkerPool, trained: Trained, tmp_path: Path, strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    whole, folder = trained(2, "ShardableGPT2", "tensor", {}, gradient_clip_val=0.5)
    saved = folder / "epoch=1.ckpt"
    resumed = pool.run(
        fit, ranks, "ShardableGPT2", strategy, options, ranks, tmp_path, saved, init=False, gradient_clip_val=0.5
    )
    weights = [joined([report for report, _, _ in run], "weights") for run in (whole, resumed)]
    assert largest_difference(*weights) < 1e-12


@pytest.mark.parametrize("ranks", [2, *thorough(1, 4)])
def test_stages_in_shards_over_replicas_are_resumed_and_open_without(
    pool: WorkerPool, trained: Trained, tmp_path: Path, ranks: int
) -> None:
    options = {"stages": 2, "data_parallel_kind": "fully_shard", "microbatches": 2}
    whole, folder = trained(4, "Llama", "sync", options)
    last = folder / "epoch=3.ckpt"
    if ranks == 4:
        resumed = pool.run(fit, 4, "Llama", "sync", options, 4, tmp_path, folder / "epoch=1.ckpt", init=False)
        weights = [joined([report for report, _, _ in run], "weights") for run in (whole, resumed)]
        assert largest_difference(*weights) == 0
    else:  # nothing is left to be trained: what is read is what was saved
        read = pool.run(fit, ranks, "Llama", "sync", {}, ranks, tmp_path, last, init=False)
        weights = [joined([report for report, _, _ in run], "weights") for run in (whole, read)]
        assert largest_difference(*weights) == 0
    assert largest_difference(read_full(last), weights[0]) == 0


FULLY_SHARDED_SHARDS = {"stages": 1, "tensor_parallel": 2, "data_parallel_kind": "fully_shard"}


@pytest.mark.thorough
def test_shards_in_shards_over_replicas_are_resumed_to_the_bit(
    pool: WorkerPool, trained: Trained, tmp_path: Path
) -> None:
    whole, folder = trained(4, "ShardableGPT2", "sync", FULLY_SHARDED_SHARDS)
    saved = folder / "epoch=1.ckpt"
    resumed = pool.run(fit, 4, "ShardableGPT2", "sync", FULLY_SHARDED_SHARDS, 4, tmp_path, saved, init=False)
    weights = [joined([report for report, _, _ in run], "weights") for run in (whole, resumed)]
    assert largest_difference(*weights) == 0
    full = read_full(folder / "epoch=3.ckpt")  # a tied parameter has one name there
    assert largest_difference(full, {name: weights[0][name] for name in full}) == 0


@pytest.mark.parametrize(("ranks", "strategy", "options"), thorough((3, "tensor", {}), (2, "sync", {})))
def test_shards_in_shards_over_replicas_open_without(
    pool: WorkerPool, trained: Trained, tmp_path: Path, ranks: int, strategy: str, options: dict[str, Any]
) -> None:
    whole, folder = trained(4, "ShardableGPT2", "sync", FULLY_SHARDED_SHARDS)
    last = folder / "epoch=3.ckpt"  # nothing is left to be trained: what is read is what was saved
    read = pool.run(fit, ranks, "ShardableGPT2", strategy, options, ranks, tmp_path, last, init=False)
    weights = [joined([report for report, _, _ in run], "weights") for run in (whole, read)]
    assert largest_difference(*weights) == 0


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), *thorough((2, "tensor"))])
def test_others_open_in_shards_of_shards(
    pool: WorkerPool, trained: Trained, tmp_path: Path, ranks: int, strategy: str
) -> None:
    """The optimizer's state too: what is saved of it again is what it was."""
    whole, folder = trained(ranks, "ShardableGPT2", strategy, {})
    last = folder / "epoch=3.ckpt"
    read = pool.run(saved_again, 4, last, tmp_path / "again.ckpt", init=False)
    weights = [joined([report for report, _, _ in whole], "weights"), joined(read, "weights")]
    assert largest_difference(*weights) == 0
    states = [pool.run(states_in, 1, path, init=False)[0] for path in (last, tmp_path / "again.ckpt")]
    assert states[0].keys() == states[1].keys()
    assert largest_difference(*states) == 0


def saved_again(path: Path, to: Path) -> Report:
    """What a run in shards of shards has read, and has written again."""
    torch.set_default_dtype(torch.float64)
    module = ALL["ShardableGPT2"]()
    spoil(module)
    trainer = make_trainer("sync", [], FULLY_SHARDED_SHARDS, max_epochs=EPOCHS)
    trainer.fit(module, ALL["ShardableGPT2"].loader(), ckpt_path=path)
    report = Report(weights={name: complete(p.detach()) for name, p in here(module).items()})
    report.shards = trainer.strategy.local_model.shards  # type: ignore[attr-defined]
    trainer.save_checkpoint(to)
    return report


def states_in(path: Path) -> dict[str, Any]:
    """The optimizer's tensors in a checkpoint, plain or not, by parameter and name."""
    module = ALL["ShardableGPT2"]()
    trainer = make_trainer("sync", [], {"stages": 1}, max_epochs=EPOCHS)
    trainer.fit(module, ALL["ShardableGPT2"].loader(), ckpt_path=path)
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = trainer.optimizers[0]
    return {f"{names[p]} {key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def test_a_plain_checkpoint_of_one_process_continues_in_shards(
    pool: WorkerPool, trained: Trained, tmp_path: Path
) -> None:
    [(whole, _, loss)], folder = trained(1, "ShardableGPT2", "single", {})
    resumed = pool.run(fit, 3, "ShardableGPT2", "tensor", {}, 3, tmp_path, folder / "epoch=1.ckpt", init=False)
    assert largest_difference(joined([report for report, _, _ in resumed], "weights"), whole.weights) < 1e-12
    assert resumed[0][2] == pytest.approx(loss, rel=0, abs=1e-12)


def test_every_stage_is_in_the_directory(pool: WorkerPool, tmp_path: Path) -> None:
    reports = pool.run(fit, 3, "LeNet", "async", {}, 3, tmp_path, init=False)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert is_checkpoint(tmp_path / "last.ckpt")
    full = read_full(tmp_path / "epoch=3.ckpt")
    assert largest_difference(full, joined([report for report, _, _ in reports], "weights")) == 0


def orders_saved(folder: Path) -> list[list[str]]:
    """The optimizer's parameters in checkpoints after training, and after a test that followed it."""
    module = ALL["LeNet"]()
    trainer = make_trainer("sync", [], {})
    trainer.fit(module, module.loader())
    trainer.save_checkpoint(folder / "fitted")
    module.test_step = module.training_step
    trainer.test(module, module.loader(), verbose=False)
    trainer.save_checkpoint(folder / "tested")
    groups = [
        load(folder / name, model={}, parameters=[], coordinate="", strict=False) for name in ("fitted", "tested")
    ]
    return [[*each.optimizers[0].param_groups[0]["params"]] for each in groups]


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
        trainer = L.Trainer(
            accelerator="cpu", devices=2, max_epochs=1 if resume is None else 2, logger=False,
            callbacks=[ModelCheckpoint(folder, "{epoch}")], strategy=STRATEGIES["sync"](),
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(kind(), kind.loader(), ckpt_path=resume)


def test_other_parameter_groups_are_refused_with_the_fix(pool: WorkerPool, tmp_path: Path) -> None:
    failures = pool.run(resume_without_a_group, 2, tmp_path, init=False, expect_errors=True)
    assert_refused(failures, "ValueError", ["has 2 parameter groups, but configure_optimizers made 1", "callback"])


def take(path: Path, content: dict[str, Any]) -> None:
    """Resume from a plain checkpoint; nothing may have changed if it is refused."""
    module = ALL["Blocks"]()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if torch.distributed.get_rank() == 0:
        torch.save({"state_dict": before | content, "pytorch-lightning_version": "2.6.6", "loops": {}}, path)
    torch.distributed.barrier()
    try:
        make_trainer("sync", [], {"microbatches": 2}).fit(module, ALL["Blocks"].loader(), ckpt_path=path)
    finally:
        assert all(torch.equal(tensor, before[name]) for name, tensor in here(module).items())


@pytest.mark.parametrize(("change", "said"), [
    ("shape", "has shape (1,) in it and"),
    ("more", "other.weight is in no rank's model"),
])  # fmt: skip
def test_a_plain_checkpoint_of_another_model_is_refused_before_anything_changes(
    pool: WorkerPool, tmp_path: Path, change: str, said: str
) -> None:
    bias = next(name for name in ALL["Blocks"]().state_dict() if name.endswith("bias"))
    content = {bias: torch.zeros(1)} if change == "shape" else {"other.weight": torch.zeros(1)}
    failures = pool.run(take, 2, tmp_path / "plain.ckpt", content, expect_errors=True)
    assert_refused(failures, "ValueError", ["plain.ckpt does not fit the model", said])


class Counts(torch.nn.Linear):
    """It keeps something that is neither a parameter nor a buffer."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Counting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Counts(3, 4), Counts(4, 1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.first.calls += 1
        self.last.calls += 2

    def training_step(self, batch: Any) -> Any:
        return self.last(self.first(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def count(folder: Path, strategy: str, resume: str | None, epochs: int) -> tuple[int, int]:
    module = Counting()
    options = {"layers": ["first", "last"], "microbatches": 1} if strategy == "sync" else {}
    trainer = make_trainer(strategy, [], options, max_epochs=epochs)
    loader = torch.utils.data.DataLoader(torch.ones(6, 3), 2)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=None if resume is None else folder / resume)
    trainer.save_checkpoint(folder / f"{strategy}.ckpt")
    return module.first.calls, module.last.calls


def test_what_modules_keep_besides_tensors_is_saved_and_opens_everywhere(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(count, 2, tmp_path, "sync", None, 1, init=False) == [(3, 6)] * 2
    assert pool.run(count, 1, tmp_path, "single", "sync.ckpt", 2, init=False) == [(6, 12)]
    assert pool.run(count, 2, tmp_path, "sync", "single.ckpt", 3, init=False) == [(9, 18)] * 2
    fresh = Counting()
    fresh.load_state_dict(read_full(tmp_path / "sync.ckpt"))
    assert (fresh.first.calls, fresh.last.calls) == (9, 18)
    assert Counting.load_from_checkpoint(tmp_path / "sync.ckpt").last.calls == 18
