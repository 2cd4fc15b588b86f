"""What can't be trained is refused on every rank, before training, with the setting, its value and the fix; and a rank
that is lost ends the others within seconds."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.absent.tensor import AbsentTensor
from tests.strategies.failures import LIMIT, assert_lost, assert_refused
from tests.strategies.observed import CLASSES, WIDTH, Net, Observed, fit, loader, make_trainer
from tests.thorough import thorough
from tools.workers.pool import Failure, WorkerPool

# -- refused where the strategy or the Trainer is made -------------------------------------------------------


@pytest.mark.parametrize(("make", "words"), [
    (lambda: lp.PipelineStrategy(schedule="zigzag"), ["schedule='zigzag'", "'gpipe'", "'1f1b'", "'naive'"]),  # type: ignore[arg-type]
    (lambda: lp.PipelineStrategy(microbatches=0), ["microbatches=0", "integer of at least 1"]),
    (lambda: lp.PipelineStrategy(schedule="naive", microbatches=4), ["microbatches=4", "naive", "'1f1b'"]),
    (lambda: lp.AsyncPipelineStrategy(microbatches="many"), ["microbatches='many'", "'auto'"]),  # type: ignore[arg-type]
    (lambda: lp.AsyncPipelineStrategy(schedule="zbv"), ["schedule='zbv'", "'vhalf'"]),  # type: ignore[arg-type]
    (lambda: lp.AsyncPipelineStrategy(schedule="vmin", weights="2bw"), ["weights='2bw'", "'vmin'", "'stash'"]),
    (lambda: lp.AsyncPipelineStrategy(schedule="vmin", extra_in_flight=1), ["extra_in_flight=1", "'vmin'", "'vhalf'"]),
    (lambda: lp.PipelineStrategy(timeout=0), ["timeout=0", "a number of at least 1, or a timedelta"]),
    (lambda: lp.TensorParallelStrategy(plan={"net.0": 3}), ["plan=", "a dictionary"]),  # type: ignore[dict-item]
    (lambda: lp.FullyShardedStrategy(process_group_backend="mpi"), ["'mpi'", "'gloo' or 'nccl'"]),  # type: ignore[arg-type]
])  # fmt: skip
def test_wrong_options_are_refused_by_the_constructor(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_setting_that_there_is_not_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match="PipelineStrategy has no setting 'microbatch'. Did you mean 'microbatches'?"):
        lp.PipelineStrategy(microbatch=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("strategy", [
    lp.PipelineStrategy, lp.AsyncPipelineStrategy, lp.TensorParallelStrategy, lp.FullyShardedStrategy,
    lp.DataParallelStrategy,
])  # fmt: skip
def test_synchronised_batchnorm_is_refused_before_processes_start(strategy: Any) -> None:
    with pytest.raises(ValueError, match="sync_batchnorm=True"):
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy(), sync_batchnorm=True, logger=False)


@pytest.mark.parametrize(("stages", "words"), [
    (3, ["stages=3", "does not fill 2 processes", "devices", "a multiple of 3"]),
    (0, ["stages=0", "integer of at least 1, or 'auto'"]),
    ("half", ["stages='half'", "integer of at least 1, or 'auto'"]),
])  # fmt: skip
def test_stages_that_do_not_fill_the_world_are_refused_before_processes_start(stages: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        L.Trainer(accelerator="cpu", devices=2, strategy=lp.PipelineStrategy(stages=stages), logger=False)
    assert all(word in str(caught.value) for word in words), caught.value


# -- refused by Trainer.fit, on every rank -------------------------------------------------------------------


CLOCK: dict[str, Any] = {"val_check_interval": timedelta(minutes=1)}
SCALED: dict[str, Any] = {"plugins": [MixedPrecision("16-mixed", "cpu")]}


@pytest.mark.parametrize(("strategy", "given", "words"), [
    ("async", CLOCK, ["val_check_interval is a time (60 s)", "number of batches"]),
    ("async", SCALED, ["precision='16-mixed'", "overflows", "'bf16-mixed'", "'32-true'"]),
])  # fmt: skip
def test_options_of_the_trainer_that_a_strategy_cannot_keep_are_refused(
    pool: WorkerPool, strategy: str, given: dict[str, Any], words: list[str]
) -> None:
    failures = pool.run(fit, 2, Observed, strategy, init=False, expect_errors=True, timeout=LIMIT, **given)
    assert_refused(failures, "ValueError", words)


class OwnBackward(Net):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.net[0], self.net[2])]


class SecondOrder(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoChain(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, CLASSES)  # type: ignore[assignment]


class DropsLayers(Net):
    def logits_and_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        hidden = self.net[1](self.net[0](batch[0]))
        for _ in range(8):
            if torch.rand(()) < 0.5:
                hidden = self.net[2](hidden)
        logits = self.net[4](hidden)
        return logits, F.cross_entropy(logits, batch[1])


class AsksBetween(Net):
    def logits_and_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        hidden = self.net[0](batch[0])
        logits = self.net[4](self.net[2](hidden / hidden.abs().max().item()))
        return logits, F.cross_entropy(logits, batch[1])


class MadeAtTheStart(Net):
    def on_train_start(self) -> None:
        self.scale = 2.0

    def logits_and_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.net(batch[0] * self.scale)
        return logits, F.cross_entropy(logits, batch[1])


class OwnIterator(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class OwnValidationIterator(Net):
    def validation_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


class Graphed(Net):
    """As torch.cuda.make_graphed_callables leaves a layer."""

    def __init__(self) -> None:
        super().__init__()
        forward = self.net[2].forward

        def new_forward(*args: Any) -> Any:
            return forward(*args)

        new_forward.__module__ = "torch.cuda.graphs"
        self.net[2].forward = new_forward


class NoTensors(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(next(iter(loader())), batch_idx)


class Hooked(Net):
    """The gradient of a layer's output is halved on its own stage, and on the next one again."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net:
            layer.register_forward_hook(halve)


def halve(layer: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / 2)


@pytest.mark.parametrize(("kind", "strategy", "options", "error", "words"), [
    (Net, "sync", {"layers": ["net.0", "net.2"]}, "ValueError", ["stages=3", "only 2 layers", "at most 2 stages"]),
    (Net, "async", {"layers": ["nett.*"]}, "ValueError", ["'nett.*' matches no module", "Did you mean"]),
    (Net, "sync", {"balance": [1, 1]}, "ValueError", ["balance=[1, 1]", "3 positive layer counts", "sum to 5"]),
    (NoChain, "async", {}, "ValueError", ["stages=3", "only 1 layers", "other axes"]),
    (
        Net, "sync", {"balance": [1, 1, 3]}, "ValueError",
        ["Stage 1 of 3", "no parameters", "fewer stages", "'net.1'"],
    ),
    (OwnBackward, "async", {}, "ValueError", ["OwnBackward.backward", "Remove the override"]),
    (Graphed, "sync", {}, "ValueError", ["'net.2'", "make_graphed_callables"]),
    (OwnIterator, "async", {}, "ValueError", ["training_step(dataloader_iter)", "training_step(batch)"]),
    (
        TwoOptimizers, "sync", {}, "ValueError",
        ["several optimizers", "parameter groups", "TensorParallelStrategy and FullyShardedStrategy train"],
    ),
    (SecondOrder, "async", {}, "ValueError", ["LBFGS"]),
    (DropsLayers, "sync", {}, "ValueError", ["'net.2' or not, by the random numbers", "layerdrop=0.0"]),
    (AsksBetween, "async", {}, "AbsentValueError", ["the output of 'net.0'", "its values are not"]),
    (MadeAtTheStart, "sync", {}, "AttributeError", ["no attribute 'scale'"]),
    (Net, "async", {"microbatches": 5}, "ValueError", ["microbatches=5", "only 4 samples", "larger batch_size"]),
])  # fmt: skip
def test_what_a_pipeline_cannot_train_is_refused_on_every_rank(
    pool: WorkerPool, kind: type[Net], strategy: str, options: dict[str, Any], error: str, words: list[str]
) -> None:
    given = {"microbatches": 2} | options
    failures = pool.run(fit, 3, kind, strategy, given, init=False, expect_errors=True, timeout=LIMIT)
    assert_refused(failures, error, words)


def test_a_hook_on_the_gradient_of_what_crosses_a_cut_is_refused(pool: WorkerPool) -> None:
    failures = pool.run(fit, 2, Hooked, "sync", init=False, expect_errors=True, timeout=LIMIT)
    assert any("RuntimeError: A hook on the gradient of what 'net." in str(text) for text in failures)
    assert all(isinstance(text, Failure) for text in failures)


class Keeps(Net):
    """Keeps parameters, or their ids, as a list of pairs, a dictionary or a set. A second run keeps the parts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        named = [(n, p) for n, p in self.net.named_parameters() if n.endswith("weight")]
        made: dict[str, Any] = {"pairs": named, "dictionary": dict(named), "ids": {id(p) for _, p in named}}
        self.kept = made.get(how)

    def on_train_start(self) -> None:
        self.kept = [*self.parameters()]


def fit_keeping(how: str, strategy: str) -> None:
    plan = {"tensor": {"plan": {"net.0": "column", "net.2": "row"}}}
    module, trainer = Keeps(how), make_trainer(strategy, [], plan.get(strategy))
    trainer.fit(module, loader())
    trainer.fit(module, loader())  # the module is divided already


@pytest.mark.parametrize(("how", "strategy", "ranks"), [
    ("pairs", "sync", 2), ("dictionary", "tensor", 2), ("ids", "fsdp", 2), ("nothing", "sync", 2), ("pairs", "sync", 1),
])  # fmt: skip
def test_parameters_that_a_module_keeps_are_refused_where_parts_replace_them(
    pool: WorkerPool, how: str, strategy: str, ranks: int
) -> None:
    refused = how != "nothing" and ranks > 1
    failures = pool.run(fit_keeping, ranks, how, strategy, init=False, expect_errors=refused, timeout=LIMIT)
    if refused:
        assert_refused(failures, "ValueError", ["'kept'", "parameter 'net.", "weight'", "self.get_parameter(name)"])


def fit_words(strategy: str) -> None:
    make_trainer(strategy, []).fit(NoTensors(), DataLoader(["some", "words"], batch_size=2))  # type: ignore[arg-type]


def validate_iterating(strategy: str) -> None:
    make_trainer(strategy, []).validate(OwnValidationIterator(), loader(), verbose=False)


@pytest.mark.parametrize(("runs", "strategy", "words"), [
    (fit_words, "sync", ["holds no tensor", "tuples, lists, dicts or dataclasses of tensors"]),
    (validate_iterating, "sync", ["validation_step(dataloader_iter)", "validation_step(batch, batch_idx)"]),
])  # fmt: skip
def test_a_batch_that_no_stage_can_share_is_refused_on_every_rank(
    pool: WorkerPool, runs: Any, strategy: str, words: list[str]
) -> None:
    """It has no tensor, or the step would take it itself."""
    failures = pool.run(runs, 2, strategy, init=False, expect_errors=True, timeout=LIMIT)
    assert_refused(failures, "ValueError", words)


class Evaluated(Net):
    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.logits_and_loss(batch)[1]

    validation_step = predict_step = test_step


def run_unequally(what: str, strategy: str, options: dict[str, Any]) -> None:
    batches = DataLoader(loader().dataset, batch_size=2, sampler=range(4 + 2 * int(os.environ["RANK"])))
    trainer = make_trainer(strategy, [], options, use_distributed_sampler=False)
    getattr(trainer, what)(Evaluated(), batches)


@pytest.mark.parametrize(("what", "strategy", "options"), [
    ("fit", "fsdp", {}),
    ("predict", "fsdp", {}),
    ("fit", "sync", {"stages": 1, "data_parallel": 2, "microbatches": 1}),
])  # fmt: skip
def test_replicas_with_unequal_numbers_of_batches_are_refused(
    pool: WorkerPool, what: str, strategy: str, options: dict[str, Any]
) -> None:
    failures = pool.run(run_unequally, 2, what, strategy, options, init=False, expect_errors=True, timeout=LIMIT)
    assert_refused(failures, "ValueError", ["one replica has 2 batches, and another one 3", "_batches=2"])


class Embeds(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(WIDTH, WIDTH, **options)

    def logits_and_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        return super().logits_and_loss((self.rows(batch[0].argmax(1)), batch[1]))


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}])
def test_embeddings_that_replicas_cannot_keep_equal_are_refused(pool: WorkerPool, options: dict[str, Any]) -> None:
    one = {"tensor_parallel": 1, "data_parallel": 2}
    kind = partial(Embeds, **options)
    failures = pool.run(fit, 2, kind, "tensor", one, init=False, expect_errors=True, timeout=LIMIT)
    assert_refused(failures, "ValueError", ["'rows' has", *options])


# -- seen on one stage only ----------------------------------------------------------------------------------


class Returns(Net):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {
            "nothing": None, "detached": loss.detach(), "number": 3.0, "vector": loss.repeat(2), "dict": {"lost": loss}
        }[self.what]  # fmt: skip


@pytest.mark.parametrize(("strategy", "what", "words"), [
    ("async", "nothing", ["returned no loss", "can't skip a batch"]),
    ("sync", "detached", ["has no gradient", "detached"]),
    ("async", "vector", ["shape (2,)", "scalar"]),
    ("sync", "dict", ["no loss", "under 'loss'"]),
])  # fmt: skip
def test_a_step_without_a_loss_is_refused_and_ends_all_stages(
    pool: WorkerPool, strategy: str, what: str, words: list[str]
) -> None:
    kind = partial(Returns, what)
    last, *others = pool.run(fit, 3, kind, strategy, init=False, expect_errors=True, timeout=LIMIT)
    assert_refused([last], "RuntimeError", words)
    assert_lost(others)


class Fails(Observed):
    """Raises, or dies, on one stage in the middle of something."""

    def __init__(self, stage: int, place: str, how: str) -> None:
        super().__init__()
        self.stage, self.place, self.how = stage, place, how
        for layer in self.net:
            layer.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, args: Any, output: Any) -> None:
        strategy: Any = self.trainer.strategy
        place = "validation" if not self.training else "training" if self.global_step == 4 else "start"
        looking = isinstance(output, AbsentTensor) and strategy.layout.stage == self.stage
        if looking or strategy.layout.stage != self.stage or place != self.place:
            return
        if self.how == "dies":
            os._exit(3)
        raise KeyError("a mistake in the user's layer")


class SavesAfterAnError(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_exception(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step:  # as Lightning's callbacks: before, there is nothing to save
            trainer.save_checkpoint(self.path)


def fit_failing(strategy: str, stage: int, place: str, how: str, checkpoint: str) -> None:
    callbacks: list[Callback] = [ModelCheckpoint(checkpoint), SavesAfterAnError(f"{checkpoint}/exception")]
    trainer = make_trainer(strategy, callbacks, enable_checkpointing=True, gradient_clip_val=1.0)
    trainer.fit(Fails(stage, place, how), loader(), loader(8, 4, 5))


@pytest.mark.parametrize(("strategy", "stage", "place"), [
    ("sync", 0, "start"), ("sync", 1, "training"), ("async", 0, "training"), ("async", 2, "validation"),
    *thorough(
        ("sync", 1, "validation"), ("sync", 2, "training"), ("async", 1, "start"), ("async", 1, "training"),
    ),
])  # fmt: skip
def test_an_error_on_one_stage_ends_the_others_within_seconds(
    pool: WorkerPool, tmp_path: Any, strategy: str, stage: int, place: str
) -> None:
    failures = pool.run(
        fit_failing, 3, strategy, stage, place, "raises", str(tmp_path), init=False, expect_errors=True, timeout=LIMIT
    )
    rank = 2 - stage
    assert 'KeyError: "a mistake in the user\'s layer"' in failures[rank]
    assert_lost(failures[:rank] + failures[rank + 1 :])
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert all("exception" not in name and "tmp" not in name for name in kept), kept


@pytest.mark.parametrize(("strategy", "stage", "place"), [
    ("sync", 1, "training"), ("async", 1, "validation"),
    *thorough(("sync", 2, "training"), ("async", 0, "training")),
])  # fmt: skip
def test_a_rank_that_dies_ends_the_others_within_seconds(
    pool: WorkerPool, tmp_path: Any, strategy: str, stage: int, place: str
) -> None:
    failures = pool.run(
        fit_failing, 3, strategy, stage, place, "dies", str(tmp_path), init=False, expect_errors=True, timeout=LIMIT
    )
    rank = 2 - stage
    assert "exit code 3" in failures[rank]
    assert_lost(failures[:rank] + failures[rank + 1 :])


def fit_while_one_is_silent() -> None:
    class Sleeps(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if rank_zero_only.rank == 1 and self.global_step == 1:
                time.sleep(2)
            return super().training_step(batch, batch_idx)

    options = {"timeout": timedelta(seconds=1), "microbatches": 2}
    make_trainer("async", [], options).fit(Sleeps(), loader())


def test_a_rank_that_does_not_answer_ends_the_others_after_the_timeout(pool: WorkerPool) -> None:
    """Both pipelines receive by one channel."""
    failures = pool.run(fit_while_one_is_silent, 2, init=False, expect_errors=True, timeout=LIMIT)
    assert_lost(failures[:1])
    assert isinstance(failures[1], Failure)


# -- names ---------------------------------------------------------------------------------------------------


def made_by_name(names: list[str]) -> list[str]:
    made: list[Any] = [L.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False) for name in names]
    late = lp.AsyncPipelineStrategy
    strategies: list[Any] = [trainer.strategy for trainer in made]
    return ["asynchronous" if isinstance(each, late) else each.options.schedule for each in strategies]


NAMES = {
    "pipeline_naive": "naive", "pipeline_gpipe": "gpipe", "pipeline_1f1b": "1f1b",
    "pipeline_interleaved": "interleaved", "pipeline_zbv": "zbv", "pipeline_async": "asynchronous",
    "pipeline_tensor": "1f1b",
}  # fmt: skip


def test_strategies_can_be_given_by_name(pool: WorkerPool) -> None:
    assert pool.run(made_by_name, 2, [*NAMES], init=False) == [[*NAMES.values()]] * 2


def test_tensor_ranks_leave_the_other_devices_to_replicas() -> None:
    strategy = lp.TensorParallelStrategy(tensor_parallel=2)
    L.Trainer(accelerator="cpu", devices=8, strategy=strategy, logger=False)
    assert (strategy.layout.size("tensor"), strategy.layout.size("data")) == (2, 4)
