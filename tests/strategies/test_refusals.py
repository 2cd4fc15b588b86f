"""What can't be trained is refused on every rank, before training, with the setting, its value and the fix; and a rank
that is lost ends the others within seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import lightning_parallel as lp
from lightning_parallel.absent.tensor import AbsentTensor
from tests.strategies.failures import LIMIT, assert_lost, assert_refused
from tests.strategies.observed import WIDTH, Net, fit, loader, make_trainer
from tests.thorough import thorough
from tools.workers.pool import Failure

# -- refused where the strategy or the Trainer is made -------------------------------------------------------


@pytest.mark.parametrize(("strategy", "options", "words"), [
    (lp.AsyncPipelineStrategy, {"schedule": "vmin", "weights": "2bw"}, ["weights='2bw'", "'vmin'", "'stash'"]),
    (lp.AsyncPipelineStrategy, {"schedule": "vmin", "extra_in_flight": 1}, ["extra_in_flight=1", "'vmin'"]),
    (lp.PipelineStrategy, {"timeout": 0}, ["timeout=0", "a number of at least 1, or a timedelta"]),
    (lp.PipelineStrategy, {"schedule": "naive", "microbatches": 4}, ["microbatches=4", "naive", "'1f1b'"]),
    (lp.PipelineStrategy, {"schedule": "zbv", "chunks": 2}, ["chunks=2", "schedule='interleaved'"]),
    (lp.PipelineStrategy, {"schedule": "vhalf", "activation_memory": 0.5}, ["activation_memory=0.5", "'zbv'"]),
    (lp.PipelineStrategy, {"schedule": "zbv", "activation_memory": "6 gigs"}, ["'6 gigs'", "a number from 0 to 1"]),
    (lp.PipelineStrategy, {"schedule": "vhalf", "post_validation": True}, ["post_validation=True", "'vhalf'"]),
    (
        lp.PipelineStrategy, {"schedule": "zbv", "post_validation": True, "data_parallel_kind": "fully_shard"},
        ["post_validation=True", "'fully_shard'"],
    ),
])  # fmt: skip
def test_wrong_options_are_refused_by_the_constructor(strategy: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        strategy(**options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("strategy", [lp.PipelineStrategy, lp.DataParallelStrategy])
def test_synchronised_batchnorm_is_refused_before_processes_start(strategy: Any) -> None:
    with pytest.raises(ValueError, match="sync_batchnorm=True"):
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy(), sync_batchnorm=True, logger=False)


def test_stages_that_do_not_fill_the_world_are_refused_before_processes_start() -> None:
    with pytest.raises(ValueError, match="stages=3.*does not fill 2 processes.*devices.*a multiple of 3"):
        L.Trainer(accelerator="cpu", devices=2, strategy=lp.PipelineStrategy(stages=3), logger=False)


# -- refused by Trainer.fit, on every rank -------------------------------------------------------------------


CLOCK: dict[str, Any] = {"val_check_interval": timedelta(minutes=1)}
SCALED: dict[str, Any] = {"plugins": [MixedPrecision("16-mixed", "cpu")]}


class OwnIterator(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


class OwnValidationIterator(Net):
    def validation_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


def asks_between(self: Any, inputs: Tensor) -> Tensor:
    hidden = self.net[0](inputs)
    return self.net[2:](hidden / hidden.abs().max().item())


def halve(layer: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / 2)


def fetches(self: Any, batch: Any, batch_idx: int) -> Any:
    return Net.training_step(self, next(iter(loader())), batch_idx)


OwnBackward = type("OwnBackward", (Net,), {"backward": lambda self, loss: loss.backward()})
TwoOptimizers = type(
    "TwoOptimizers", (Net,), {"configure_optimizers": lambda self: [SGD([p]) for p in self.parameters()]}
)
SecondOrder = type("SecondOrder", (Net,), {"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters())})
AsksBetween = type("AsksBetween", (Net,), {"logits": asks_between})
NoTensors = type("NoTensors", (Net,), {"training_step": fetches})
# The gradient of a layer's output is halved on its own stage, and on the next one again.
Hooked = type("Hooked", (Net,), {"build": lambda self: [layer.register_forward_hook(halve) for layer in self.net]})
Predicts = type("Predicts", (Net,), {"predict_step": Net.training_step})


class DropsLayers(Net):
    def logits(self, inputs: Tensor) -> Tensor:
        hidden = self.net[:2](inputs)
        for _ in range(8):
            if torch.rand(()) < 0.5:
                hidden = self.net[2](hidden)
        return self.net[4](hidden)


class MadeAtTheStart(Net):
    def on_train_start(self) -> None:
        self.scale = 2.0

    def logits(self, inputs: Tensor) -> Tensor:
        return self.net(inputs * self.scale)


class Graphed(Net):
    """As torch.cuda.make_graphed_callables leaves a layer."""

    def build(self) -> None:
        forward = self.net[2].forward

        def new_forward(*args: Any) -> Any:
            return forward(*args)

        new_forward.__module__ = "torch.cuda.graphs"
        self.net[2].forward = new_forward


class HookedLater(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for layer in self.net:
                layer.register_forward_hook(lambda layer, args, output: output * 1.5, prepend=True)


@pytest.mark.parametrize(("kind", "said"), [
    (Hooked, "A hook on the gradient of what 'net."), (HookedLater, "A forward hook was registered on 'net."),
])  # fmt: skip
def test_a_hook_that_would_run_on_two_stages_is_refused(launch: Any, kind: type[Net], said: str) -> None:
    failures = launch(fit, 2, kind, "sync", expect_errors=True, timeout=LIMIT)
    assert any(f"RuntimeError: {said}" in str(text) for text in failures)
    assert all(isinstance(text, Failure) for text in failures)


class Keeps(Net):
    """Keeps parameters, or their ids, as a list of pairs, a dictionary or a set. A second run keeps the parts."""

    def build(self) -> None:
        named = [(n, p) for n, p in self.net.named_parameters() if n.endswith("weight")]
        made: dict[str, Any] = {"pairs": named, "dictionary": dict(named), "ids": {id(p) for _, p in named}}
        self.kept = made.get(self.how)

    def on_train_start(self) -> None:
        self.kept = [*self.parameters()]


def fit_keeping(how: str, strategy: str) -> None:
    plan = {"tensor": {"plan": {"net.0": "column", "net.2": "row"}}}
    module, trainer = Keeps(how=how), make_trainer(strategy, [], plan.get(strategy))
    trainer.fit(module, loader())
    trainer.fit(module, loader())  # the module is divided already


@pytest.mark.parametrize(("how", "strategy", "ranks"), [
    ("pairs", "sync", 2), ("dictionary", "tensor", 2), ("ids", "fsdp", 2), ("nothing", "sync", 2), ("pairs", "sync", 1),
])  # fmt: skip
def test_parameters_that_a_module_keeps_are_refused_where_parts_replace_them(
    launch: Any, how: str, strategy: str, ranks: int
) -> None:
    refused = how != "nothing" and ranks > 1
    failures = launch(fit_keeping, ranks, how, strategy, expect_errors=refused, timeout=LIMIT)
    if refused:
        assert_refused(failures, "ValueError", ["'kept'", "parameter 'net.", "weight'", "self.get_parameter(name)"])


class Embeds(Net):
    """Replicas could not keep these rows equal."""

    def build(self) -> None:
        self.rows = nn.Embedding(WIDTH, WIDTH, **self.options)

    def logits(self, inputs: Tensor) -> Tensor:
        return super().logits(self.rows(inputs.argmax(1)))


def fit_words(strategy: str, **given: Any) -> None:
    trainer = make_trainer(strategy, [], **given)
    trainer.fit(NoTensors(), DataLoader(["some", "words"], batch_size=2))  # type: ignore[arg-type]


def validate_iterating(strategy: str) -> None:
    make_trainer(strategy, []).validate(OwnValidationIterator(), loader(), verbose=False)


def run_unequally(what: str, strategy: str, **options: Any) -> None:
    batches = DataLoader(loader().dataset, batch_size=2, sampler=range(4 + 2 * int(os.environ["RANK"])))
    trainer = make_trainer(strategy, [], options, use_distributed_sampler=False)
    getattr(trainer, what)(Predicts(), batches)


def of(kind: Callable[[], Net], strategy: str, options: dict[str, Any] | None = None, **given: Any) -> Any:
    return partial(fit, kind, strategy, {"microbatches": 2} | (options or {}), **given)


TWO = {"stages": 1, "data_parallel": 2}
UNEQUAL = ["one replica has 2 batches, and another one 3", "_batches=2"]


@pytest.mark.parametrize(("ranks", "runs", "error", "words"), [
    (2, of(Net, "async", **CLOCK), "ValueError", ["val_check_interval is a time (60 s)", "number of batches"]),
    (2, of(Net, "async", **SCALED), "ValueError", ["precision='16-mixed'", "overflows", "'bf16-mixed'"]),
    (3, of(Net, "sync", {"balance": [1, 1, 3]}), "ValueError", ["Stage 1 of 3", "no parameters", "'net.1'"]),
    (2, of(OwnBackward, "async"), "ValueError", ["OwnBackward.backward", "Remove the override"]),
    (2, of(Graphed, "sync"), "ValueError", ["'net.2'", "make_graphed_callables"]),
    (2, of(OwnIterator, "async"), "ValueError", ["training_step(dataloader_iter)", "training_step(batch)"]),
    (2, of(TwoOptimizers, "sync"), "ValueError", ["several optimizers", "parameter groups"]),
    (2, of(SecondOrder, "async"), "ValueError", ["LBFGS"]),
    (2, of(DropsLayers, "sync"), "ValueError", ["'net.2' or not, by the random numbers", "layerdrop=0.0"]),
    (2, of(AsksBetween, "async"), "AbsentValueError", ["the output of 'net.0'", "its values are not"]),
    (2, of(MadeAtTheStart, "sync"), "AttributeError", ["no attribute 'scale'"]),
    (2, of(Net, "async", {"microbatches": 5}), "ValueError", ["microbatches=5", "only 4 samples", "larger batch_size"]),
    (2, partial(fit_words, "sync"), "ValueError", ["holds no tensor", "tuples, lists, dicts"]),
    (1, partial(fit_words, "data", devices=2), "ValueError", ["no tensor that could be split along dimension 0"]),
    (1, partial(fit, OwnIterator, "data", devices=2), "ValueError", ["split"]),
    (2, partial(validate_iterating, "sync"), "ValueError", ["validation_step(dataloader_iter)", "(batch, batch_idx)"]),
    (2, partial(run_unequally, "predict", "fsdp"), "ValueError", UNEQUAL),
    (2, partial(run_unequally, "fit", "sync", **TWO, microbatches=1), "ValueError", UNEQUAL),
    (2, of(partial(Embeds, options={"max_norm": 1.0}), "sync", TWO), "ValueError", ["'rows' has", "max_norm"]),
    (2, of(partial(Embeds, options={"sparse": True}), "sync", TWO), "ValueError", ["'rows' has", "sparse"]),
])  # fmt: skip
def test_what_cannot_be_run_is_refused(refused: Any, ranks: int, runs: Any, error: str, words: list[str]) -> None:
    refused(words, runs, ranks, error=error)


# -- seen on one stage only ----------------------------------------------------------------------------------


class Returns(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {
            "nothing": None, "detached": loss.detach(), "vector": loss.repeat(2), "dict": {"lost": loss}
        }[self.what]  # fmt: skip


@pytest.mark.parametrize(("strategy", "what", "words"), [
    ("async", "nothing", ["returned no loss", "can't skip a batch"]),
    ("sync", "detached", ["has no gradient", "detached"]),
    ("async", "vector", ["shape (2,)", "scalar"]),
    ("sync", "dict", ["no loss", "under 'loss'"]),
])  # fmt: skip
def test_a_step_without_a_loss_is_refused_and_ends_all_stages(
    launch: Any, strategy: str, what: str, words: list[str]
) -> None:
    kind = partial(Returns, what=what)
    last, *others = launch(fit, 2, kind, strategy, expect_errors=True, timeout=LIMIT)
    assert_refused([last], "RuntimeError", words)
    assert_lost(others)


class Fails(Net):
    """Raises, or dies, on one stage in the middle of something."""

    def build(self) -> None:
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

    validation_step = Net.training_step


def fit_failing(strategy: str, stage: int, place: str, how: str, checkpoint: str) -> None:
    def save(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step:  # as Lightning's callbacks: before, there is nothing to save
            trainer.save_checkpoint(f"{checkpoint}/exception")

    callbacks = [ModelCheckpoint(checkpoint), LambdaCallback(on_exception=save)]
    trainer = make_trainer(strategy, callbacks, enable_checkpointing=True, gradient_clip_val=1.0)
    trainer.fit(Fails(stage=stage, place=place, how=how), loader(), loader(8, 4, 5))


SAID = {"raises": 'KeyError: "a mistake in the user\'s layer"', "dies": "exit code 3"}


@pytest.mark.parametrize(("how", "strategy", "stage", "place"), [
    ("raises", "sync", 0, "start"), ("raises", "sync", 1, "training"), ("raises", "async", 2, "validation"),
    ("dies", "sync", 1, "training"), ("dies", "async", 1, "validation"),
    *thorough(
        ("raises", "sync", 1, "validation"), ("raises", "sync", 2, "training"), ("raises", "async", 0, "training"),
        ("raises", "async", 1, "start"), ("dies", "sync", 2, "training"), ("dies", "async", 0, "training"),
    ),
])  # fmt: skip
def test_a_stage_that_fails_ends_the_others_within_seconds(
    launch: Any, tmp_path: Any, how: str, strategy: str, stage: int, place: str
) -> None:
    given = {"expect_errors": True, "timeout": LIMIT}
    failures = launch(fit_failing, 3, strategy, stage, place, how, str(tmp_path), **given)
    rank = 2 - stage
    assert SAID[how] in failures.pop(rank)
    assert_lost(failures)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert how == "dies" or all("exception" not in name and "tmp" not in name for name in kept), kept


def fit_while_one_is_silent() -> None:
    class Sleeps(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if rank_zero_only.rank == 1 and self.global_step == 1:
                time.sleep(1.5)
            return super().training_step(batch, batch_idx)

    options = {"timeout": timedelta(seconds=1), "microbatches": 2}
    make_trainer("async", [], options).fit(Sleeps(), loader())


def test_a_rank_that_does_not_answer_ends_the_others_after_the_timeout(launch: Any) -> None:
    """Both pipelines receive by one channel."""
    failures = launch(fit_while_one_is_silent, 2, expect_errors=True, timeout=LIMIT)
    assert_lost(failures[:1])
    assert isinstance(failures[1], Failure)


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind", "schedule"), [
    *((f"pipeline_{each}", lp.PipelineStrategy, each) for each in ("naive", "gpipe", "1f1b", "interleaved", "zbv")),
    ("pipeline_tensor", lp.PipelineStrategy, "1f1b"), ("pipeline_async", lp.AsyncPipelineStrategy, "1f1b"),
    ("data_parallel", lp.DataParallelStrategy, None),
])  # fmt: skip
def test_strategies_can_be_given_by_name(name: str, kind: type[Any], schedule: str | None) -> None:
    strategy: Any = L.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
    assert type(strategy) is kind and (schedule is None or strategy.options.schedule == schedule)
