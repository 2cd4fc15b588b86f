"""Replicas in one process have the numbers of a single model with the whole batch."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F

import lightning_parallel as lp
from lightning_parallel.batch import split
from tests.strategies.equality import EXACT, assert_equal
from tests.strategies.harness import ALL, Report, here, largest_difference, make_trainer, train
from tests.strategies.replicated import Forward, Normalised
from tools.workers.pool import WorkerPool


def replicated(pool: WorkerPool, model: str, replicas: int, **options: Any) -> Report:
    report: Report = pool.run(train, 1, model, "data", {}, init=False, devices=replicas, **options)[0]
    return report


# -- equality with one model -------------------------------------------------------------------------------------


# Others, in two replicas, with accumulation and clipping, are in the table of test_contract.py.
@pytest.mark.parametrize(
    ("model", "replicas", "given"),
    [
        ("GPT2", 3, {"validates_after": True}),
        ("Blocks", 4, {}),
        ("Forward", 7, {"batch_size": 5, "samples": 11}),  # fewer samples, at last one
        ("Penalised", 3, {}),
    ],
)
def test_models_train_as_in_one_process(
    pool: WorkerPool, single: Any, model: str, replicas: int, given: dict[str, Any]
) -> None:
    assert_equal([replicated(pool, model, replicas, **given)], single(model, **given))


def test_mixed_precision_reaches_the_replicas(pool: WorkerPool, single: Any) -> None:
    options = {"precision": "bf16-mixed", "dtype": torch.float32}
    found, expected = replicated(pool, "Forward", 2, **options), single("Forward", **options)
    full = single("Forward", dtype=torch.float32)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    first, alone, exact = (report.losses[0] for report in (found, expected, full))
    assert abs(first - alone) < 1e-6 < 1e-5 < abs(first - exact)


def by_hand(replicas: int, epochs: int = 2) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Normalised, each share by a copy of the model of its own."""
    model = Normalised()
    setup = model.configure_optimizers()
    losses = []
    for batch in list(Normalised.loader()) * epochs:
        parts = split(batch, min(replicas, len(batch[1])))
        copies = [copy.deepcopy(model) for _ in parts]
        weights = [len(labels) / len(batch[1]) for _, labels in parts]
        each = [
            weight * F.cross_entropy(c.net(images), labels)
            for c, weight, (images, labels) in zip(copies, weights, parts, strict=True)
        ]
        setup["optimizer"].zero_grad()
        for loss in each:
            loss.backward()
        for parameter, *theirs in zip(model.parameters(), *(c.parameters() for c in copies), strict=True):
            parameter.grad = sum(p.grad for p in theirs)
        model.net[1].load_state_dict({**model.net[1].state_dict(), **dict(copies[0].net[1].named_buffers())})
        setup["optimizer"].step()
        setup["lr_scheduler"]["scheduler"].step()
        losses.append(float(sum(each)))
    return losses, dict(model.named_parameters()), dict(model.named_buffers())


def normalised_buffers(replicas: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    module, losses = Normalised(), []

    class Losses(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))

    make_trainer("data", [Losses()], {}, devices=replicas).fit(module, Normalised.loader())
    return losses, {n: p.detach() for n, p in module.named_parameters()}, dict(module.named_buffers())


def by_hand_in_double(replicas: int) -> Any:
    torch.set_default_dtype(torch.float64)
    losses, parameters, buffers = by_hand(replicas)
    return losses, {name: p.detach() for name, p in parameters.items()}, buffers


def test_batch_norm_is_of_each_share_and_keeps_the_statistics_of_replica_0(pool: WorkerPool) -> None:
    found = pool.run(normalised_buffers, 1, 3, init=False)[0]
    expected = pool.run(by_hand_in_double, 1, 3, init=False)[0]
    assert found[0] == pytest.approx(expected[0], rel=0, abs=EXACT)
    assert largest_difference(found[1], expected[1]) < EXACT
    assert largest_difference(found[2], expected[2]) < EXACT


# -- random numbers ----------------------------------------------------------------------------------------------


def test_dropout_is_the_same_in_every_run(pool: WorkerPool) -> None:
    runs = [replicated(pool, "Dropping", 4, shuffle=True) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert largest_difference(runs[0].weights, runs[1].weights) == 0


def test_dropout_that_is_computed_again_is_the_same_dropout(pool: WorkerPool) -> None:
    runs = [replicated(pool, model, 3, shuffle=True) for model in ("Dropping", "Recomputing")]
    assert_equal([runs[0]], runs[1])


# -- what steps say beside the loss ------------------------------------------------------------------------------


def observed(strategy: str, options: dict[str, Any], devices: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    module = ALL["Observing"]()
    trainer = make_trainer(strategy, [], options, devices=devices)
    trainer.fit(module, ALL["Observing"].loader(), ALL["Observing"].loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    seen: Any = {"metrics": metrics, "steps": module.steps, "labels": module.labels.long().tolist()}
    seen["outputs"] = torch.cat(module.seen)
    seen["tested"] = trainer.test(module, ALL["Observing"].loader(), verbose=False)
    predicted = trainer.predict(module, ALL["Observing"].loader())
    seen["logits"] = torch.cat([batch["logits"] for batch in predicted])
    seen["names"] = [name for batch in predicted for name in batch["names"]]
    return seen


def test_metrics_logs_outputs_and_predictions_are_those_of_one_process(pool: WorkerPool) -> None:
    expected = pool.run(observed, 1, "single", {}, 1, init=False)[0]
    found = pool.run(observed, 1, "data", {}, 3, init=False)[0]
    for name in ("train_rows", "val_rows", "test_rows"):  # a replica's step sees its share's
        for metrics in (found["metrics"], expected["metrics"], found["tested"][0], expected["tested"][0]):
            metrics.pop(name, None)
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=EXACT)
    assert found["tested"] == [pytest.approx(expected["tested"][0], abs=EXACT)]
    assert found["steps"] == expected["steps"]  # replica 0's
    assert found["labels"] == expected["labels"]  # in the order of the samples
    assert found["names"] == expected["names"]
    for name in ("outputs", "logits"):
        assert (found[name] - expected[name]).abs().max() < EXACT


# -- one process, and nothing left behind ------------------------------------------------------------------------


def a_run(folder: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    module, replicas = Forward(), []

    class Spy(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            assert (trainer.world_size, trainer.global_rank, trainer.strategy.launcher) == (1, 0, None)
            assert len(trainer.strategy.parallel_devices) == 3  # type: ignore[attr-defined]

    class Layer(torch.nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            replicas.append(weakref.ref(self))
            return super().forward(x)

    module.net[8] = Layer()
    before = set(vars(module)), {name: set(vars(m)) for name, m in module.named_modules() if name}
    saver = ModelCheckpoint(dirpath=folder, filename="model")
    trainer = make_trainer("data", [Spy(), saver], {}, devices=3, enable_checkpointing=True, max_epochs=1)
    trainer.fit(module, Forward.loader())
    gc.collect()
    after = set(vars(module)), {name: set(vars(m)) for name, m in module.named_modules() if name}
    saved = torch.load(Path(folder) / "model.ckpt", weights_only=True)["state_dict"]
    return {
        "new": [after[0] - before[0], {name: after[1][name] - before[1][name] for name in before[1]}],
        "calls": len(replicas),
        "alive": len({reference() for reference in replicas} - {None}),
        "saved": saved,
        "weights": {name: p.detach() for name, p in here(module).items()},
    }


def test_nothing_of_the_replicas_stays_and_the_checkpoint_is_a_plain_one(pool: WorkerPool, tmp_path: Path) -> None:
    run = pool.run(a_run, 1, str(tmp_path), init=False)[0]
    assert not any(run["new"][1].values())
    assert not {name for name in run["new"][0] if name in ("forward", "log", "_is_replica")}
    assert run["calls"] == 9 and run["alive"] == 1  # the model's own
    assert largest_difference(run["saved"], run["weights"]) == 0


def test_the_name_and_the_object_are_the_same_strategy() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="data_parallel", logger=False)
    assert isinstance(trainer.strategy, lp.DataParallelStrategy)
    assert trainer.world_size == 1 and len(trainer.strategy.parallel_devices) == 2


class AnyBatch(Forward):
    """Steps that take and return what no replica could share."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return {"loss": super().training_step(batch, batch_idx), "seen": torch.zeros(3), "how": self}

    def predict_step(self, batch: Any) -> Any:
        return {"length": len(batch)}


def test_one_device_takes_any_batch_and_returns_anything() -> None:
    one = trainer(devices=1, fast_dev_run=True, enable_progress_bar=False)
    one.fit(AnyBatch(), AnyBatch.loader())
    assert one.predict(AnyBatch(), ["one", "three"]) == [{"length": 3}]  # type: ignore[arg-type]


# -- refusals and failures ---------------------------------------------------------------------------------------


def test_an_error_keeps_its_type_and_names_the_replica(pool: WorkerPool) -> None:
    error = pool.run(train, 1, "Failing", "data", {}, init=False, devices=3, expect_errors=True)[0]
    assert "KeyError" in str(error) and "raised in replica 2 of 3, on cpu" in str(error)


def trainer(**options: Any) -> L.Trainer:
    strategy = lp.DataParallelStrategy()
    return L.Trainer(**{"accelerator": "cpu", "devices": 2, "logger": False, "strategy": strategy} | options)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: trainer(num_nodes=2), ["num_nodes=2", "one process", "num_nodes=1", "'ddp'"]),
    (lambda: trainer(sync_batchnorm=True), ["sync_batchnorm=True", "Leave it out", "'ddp'"]),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_where_the_trainer_is_made(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


def test_several_launched_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {
        "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": 1,
    }  # fmt: skip
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="2 processes were launched.*Launch one"):
        trainer()


class Iterating(Forward):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class Manual(Forward):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Teaches(Forward):
    """A mean teacher follows in each step. It begins as a copy."""

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            teacher.data.lerp_(student.data, 0.5)
        return super().training_step(batch, batch_idx)


class Masks(Teaches):
    """What is the same again for each replica may be written."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net[0].weight.data.clamp_(-0.01, 0.01)
        return Forward.training_step(self, batch, batch_idx)


class OneText(Forward):
    @classmethod
    def loader(cls, *_: Any) -> Any:
        return ["a text"]


@pytest.mark.parametrize(("module", "words"), [
    (Manual, ["automatic_optimization=False", "'ddp'"]),
    (Iterating, ["split"]),
    (Teaches, ["parameter 'teacher.0.weight'", "on_train_batch_end", "'ddp'"]),
    (OneText, ["no tensor that could be split along dimension 0"]),
])  # fmt: skip
def test_modules_that_cannot_be_replicated_are_refused_before_an_update(module: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        trainer(enable_checkpointing=False, enable_progress_bar=False).fit(module(), module.loader())
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_step_may_write_to_parameters_what_is_the_same_again() -> None:
    weights = []
    for options in ({}, {"strategy": "auto", "devices": 1}):
        made = Masks()
        trainer(enable_checkpointing=False, max_epochs=1, **options).fit(made, made.loader())
        weights.append({name: p.detach() for name, p in made.named_parameters()})
    assert largest_difference(*weights) < 1e-5  # float32
