"""Asynchronous pipelines have the numbers of delayed gradients, and no others: in a V, each chunk's as late as its list
says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.strategies.equality import EXACT
from tests.strategies.failures import LIMIT, assert_lost, assert_refused
from tests.strategies.harness import announcing, delayed, joined, largest_difference, make_trainer, train
from tests.strategies.models import BATCH, MODELS, Deep, Rows, Skips
from tests.strategies.test_loss_means import OfRows, Tokens, labels_that_count
from tests.strategies.test_post_validation import Odd
from tests.thorough import thorough


class Twice(torch.nn.Linear):
    """A layer with two names for one weight."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        self.other = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() @ self.other


class Uneven(Deep):
    """Batches of one to four samples."""

    @classmethod
    def loader(cls, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        batches = [[0, 1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15], [16, 17]]
        return DataLoader(Rows(cls.samples()), batch_sampler=batches)


class Counted(Deep):
    """Its optimizer counts its steps for all parameters."""

    def build(self) -> None:
        super().build()
        self.net[2][0] = Twice()

    def configure_optimizers(self) -> Any:
        optimizer = Odd(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 99)}}


def how_many_count(batch: Any) -> float:
    return float(labels_that_count(batch))


# Settings that change no number, or that the reference has by another name.
NOT_OF_ONE = ("activation_checkpointing", "data_parallel", "tensor_parallel", "microbatch_weight")
ONCE: dict[str, Any] = {"max_epochs": 1}  # the others go on after the end of an epoch
TWICE: dict[str, Any] = {"accumulate_grad_batches": 2}
CLIP: dict[str, Any] = {"gradient_clip_val": 0.05}  # in a V, the norm is that of a chunk
RECOMPUTED = {"activation_checkpointing": True}


# Model, stages, microbatches a batch, options of the strategy (and of the reference), of the Trainer.
@pytest.mark.parametrize(("model", "stages", "microbatches", "options", "trainer_options"), [
    ("LeNet", 3, 2, {"weights": "latest"}, ONCE),
    ("LeNet", 3, 1, {"lr_discount": 4, "correction": None}, {}),
    ("LeNet", 3, 1, {"extra_in_flight": 1, "correction": 0.5}, TWICE | CLIP),
    ("Blocks", 3, 2, RECOMPUTED, ONCE),  # loose parameters
    # One batch is too small for two versions. It drains the pipeline of 2BW: the batch after it would need a version
    # that no stage has yet.
    (Uneven, 4, 4, {"weights": "2bw"}, ONCE),
    (Deep, 2, 2, {"schedule": "vhalf", "correction": "error_feedback"}, TWICE),
    (Uneven, 3, 4, {"schedule": "vhalf"}, ONCE),
    (Skips, 2, 2, {"schedule": "vmin"}, {}),
    ("GPT2", 2, 2, {"schedule": "vmin"}, ONCE),  # embedding and head are tied
    ("Blocks", 2, 2, {"schedule": "vmin"}, ONCE),
    (OfRows, 2, 2, {"schedule": "vhalf", "data_parallel": 2, **RECOMPUTED}, CLIP),  # of as many samples each
    (Counted, 2, 1, {}, {}),  # which is refused in a V
    # What microbatches are weighed by is read from their losses, or a function of the user's tells it.
    (Tokens, 2, 4, {"correction": None}, TWICE | ONCE),
    (Tokens, 2, 4, {"schedule": "vhalf", "microbatch_weight": labels_that_count}, TWICE | ONCE),
    *thorough(
        ("GPT2Untied", 4, 1, {"correction": "error_feedback"}, {}), ("Llama", 3, 3, {}, CLIP),
        ("LeNet", 3, 1, {"weights": "2bw"}, TWICE), ("DemoTransformer", 3, 2, RECOMPUTED, {}),
        ("LeNet", 3, 1, {"schedule": "vmin"}, {}), (Deep, 5, 1, {"schedule": "vmin"}, {}),
        (Deep, 3, 1, {"schedule": "vhalf", "lr_discount": 4, "correction": 0.5}, {}),
        ("Llama", 2, 2, {"schedule": "vmin", "tensor_parallel": 2}, {}), ("GPT2", 2, 4, {"schedule": "vhalf"}, TWICE),
        (Uneven, 4, 4, {"schedule": "vmin", "correction": "error_feedback"}, {}),
    ),
])  # fmt: skip
def test_training_equals_delayed_gradients_to_the_bit(
    launch: Any, model: Any, stages: int, microbatches: int, options: Any, trainer_options: Any
) -> None:
    """Losses, the gradients of each update, and weights after two epochs."""
    replicas, tensor = options.get("data_parallel", 1), options.get("tensor_parallel", 1)
    given = {"stages": stages, "microbatches": microbatches, **options}
    trainer = {"batch_size": BATCH // replicas, "max_epochs": 2, **trainer_options}
    # Messages of a synchronous pipeline are announced in test_post_validation.py.
    run = partial(announcing, train) if options is RECOMPUTED else train
    reports = launch(run, stages * replicas * tensor, model, "async", given, **trainer)
    accumulate, clip = trainer_options.get("accumulate_grad_batches", 1), trainer_options.get("gradient_clip_val")
    own = {name: value for name, value in options.items() if name not in NOT_OF_ONE}
    own |= {"weigh": how_many_count} if model is Tokens else {}
    given = {"epochs": trainer["max_epochs"], "accumulate": accumulate, "clip": clip, **own}
    [single] = launch(delayed, 1, model, stages, microbatches, **given)
    # What crosses a cut of an encoder, or of Skips, is read on several stages, whose gradients are summed stage by
    # stage first. So are those of ranks, parts of norms, and weighed losses.
    is_summed = model in ("DemoTransformer", Skips, Tokens) or clip or tensor > 1
    allowed = EXACT if is_summed else 0
    if replicas == 1:  # else a rank has its replica's
        assert reports[0].losses == pytest.approx(single.losses, rel=0, abs=EXACT)
    if "schedule" not in options:  # else each chunk's, as if they were updates
        for number, expected in enumerate(single.gradients):
            found = joined(reports, "gradients", number)  # each stage's own, though they step at different times
            assert largest_difference(found, expected) <= allowed, f"update {number}"
    assert largest_difference(joined(reports, "weights"), single.weights) <= allowed


class FrozenEnd(Deep):
    """The last chunk trains nothing."""

    def build(self) -> None:
        super().build()
        self.net[8:].requires_grad_(False)


def test_a_chunk_that_trains_nothing_makes_no_steps(launch: Any) -> None:
    options = {"microbatches": 2, "schedule": "vhalf"}
    reports = launch(train, 2, FrozenEnd, "async", options, max_epochs=2)
    batches = 2 * len(FrozenEnd.loader())
    assert [len(report.gradients) for report in reports] == [batches, 2 * batches]  # the first has the last chunk
    [reference] = launch(delayed, 1, FrozenEnd, 2, 2, epochs=2, schedule="vhalf")
    assert largest_difference(joined(reports, "weights"), reference.weights) == 0


@pytest.mark.parametrize(("stages", "microbatches", "epochs", "given"), [
    (3, 1, 1, {}), *thorough((3, 2, 2, {"extra_in_flight": 1}), (4, 3, 2, {"weights": "2bw"})),
])  # fmt: skip
def test_averages_are_of_weights_with_delayed_gradients(
    launch: Any, stages: int, microbatches: int, epochs: int, given: dict[str, Any]
) -> None:
    """Each stage averages after its own update, which is that of an earlier batch."""
    options = {"stages": stages, "microbatches": microbatches, **given}
    trainer = {"max_epochs": epochs, "limit_val_batches": 0 if epochs == 1 else 1.0}  # where only the run's end drains
    average = partial(EMAWeightAveraging, decay=0.8, update_every_n_steps=2, update_starting_at_epoch=0)
    reports = launch(train, stages, "LeNet", "async", options, callbacks=[average], **trainer)
    given = {"epochs": epochs, "average": average, **given}
    [reference] = launch(delayed, 1, "LeNet", stages, microbatches, **given)
    assert largest_difference(joined(reports, "weights"), reference.weights) <= EXACT


@pytest.mark.parametrize("schedule", ["1f1b", "vmin"])
def test_one_stage_is_the_plain_loop_to_the_bit(launch: Any, schedule: str) -> None:
    plain = launch(train, 1, "Blocks")[0]
    staged = launch(train, 1, "Blocks", "async", {"microbatches": 1, "schedule": schedule})[0]
    assert staged.losses == plain.losses
    assert largest_difference(staged.weights, plain.weights) == 0


# -- microbatches ----------------------------------------------------------------------------------------------------


def sizes_of_microbatches(batch_size: int, accumulate: int) -> list[int]:
    """Of the first batch, with `microbatches="auto"`."""
    sizes: list[int] = []

    def weigh(batch: Any) -> int:
        sizes.append(len(batch[0]))
        return sizes[-1]

    given = {"batch_size": batch_size, "limit_train_batches": 1, "accumulate_grad_batches": accumulate}
    train("LeNet", "async", {"microbatch_weight": weigh}, **given)
    return sizes


@pytest.mark.parametrize(("batch_size", "accumulate", "expected"), [
    (11, 1, [3, 3, 3, 2]),  # two a stage
    (12, 2, [6] * 2),  # of an update, which has two batches
])  # fmt: skip
def test_an_update_has_two_microbatches_a_stage_where_there_are_samples(
    launch: Any, batch_size: int, accumulate: int, expected: list[int]
) -> None:
    assert launch(sizes_of_microbatches, 2, batch_size, accumulate) == [expected] * 2


@pytest.mark.parametrize(("options", "warns"), [({"microbatches": 1}, True), ({}, False)])
def test_a_setting_that_trains_badly_is_warned_of_once_with_figures(
    launch: Any, options: dict[str, Any], warns: bool
) -> None:
    reports = launch(train, 3, "LeNet", "async", options, limit_train_batches=1)
    told, *others = (report.warned_of("updates late") for report in reports)
    assert len(told) == warns and not any(others)
    assert all("microbatches='auto' with at least 6 samples" in text for text in told)


# -- what follows an update late -------------------------------------------------------------------------------------


class UsedLate(MODELS["LeNet"]):  # type: ignore[misc]
    """A loose parameter whose first gradient comes after the first update."""

    def build(self) -> None:
        super().build()
        self.late = torch.nn.Parameter(torch.ones(()))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * self.late if self.trainer.global_step > 1 else loss


def test_a_loose_parameter_first_used_after_the_first_update_is_equal_on_all_stages(launch: Any) -> None:
    reports = launch(train, 3, UsedLate, "async", {"microbatches": 2}, max_epochs=2)
    [late] = {float(report.weights["late"]) for report in reports}
    assert late != 1


class Replacing(MODELS["LeNet"]):  # type: ignore[misc]
    """After the first epoch, an optimizer that doesn't move anything takes over."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            (optimizer,) = self.trainer.optimizers
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.before = [parameter.detach().clone() for parameter in held]
            self.trainer.optimizers = [torch.optim.SGD(held, lr=0.0)]

    def on_train_epoch_end(self) -> None:
        pass


def moved_by_the_second_optimizer() -> bool:
    trainer, module = make_trainer("async", [], {"microbatches": 2}, max_epochs=2), Replacing()
    trainer.fit(module, Replacing.loader())
    (group,) = trainer.optimizers[0].param_groups
    return any(not torch.equal(p, before) for p, before in zip(group["params"], module.before, strict=True))


def test_an_optimizer_that_a_hook_puts_in_makes_the_updates(launch: Any) -> None:
    assert launch(moved_by_the_second_optimizer, 2) == [False, False]


# -- refused ----------------------------------------------------------------------------------------------------------


class OwnAverages(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = AveragedModel(module)


@pytest.mark.parametrize(("model", "callbacks", "words"), [
    ("LeNet", [OwnAverages()], ["OwnAverages.average", "Use PipelineStrategy"]),
    ("LeNet", [EMAWeightAveraging], ["EMAWeightAveraging", "schedule='vmin'", "schedule='1f1b'"]),
    ("SharedPart", [], ["blocks.0.mix", "PipelineStrategy"]),  # on two stages in a V too
    (Counted, [], ["Odd", "schedule='vmin'", "parameter group 0", "schedule='1f1b'"]),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(refused: Any, model: Any, callbacks: Any, words: list[str]) -> None:
    refused(words, train, 3, model, "async", {"microbatches": 2, "schedule": "vmin"}, callbacks=callbacks)


class OwnClipping(Deep):
    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1.0)


def test_hooks_that_are_called_for_each_chunk_are_warned_of_once(launch: Any) -> None:
    options, given = {"schedule": "vmin", "microbatches": 2}, {"max_steps": 1}
    reports = launch(train, 2, OwnClipping, "async", options, **given)
    (warning,), others = (each.warned_of("two chunks") for each in reports)
    words = ["Witness.on_before_optimizer_step", "OwnClipping.configure_gradient_clipping", "schedule='vmin'", "1f1b"]
    assert all(word in warning for word in words) and not others
    averages = [EMAWeightAveraging]  # one stage has no V, so they are allowed
    (alone,) = launch(train, 1, OwnClipping, "async", options, callbacks=averages, **given)
    assert not alone.warned_of("two chunks")


class UnequalReplicas(Deep):
    """The last batch of the second replica is smaller."""

    @classmethod
    def loader(cls, *args: Any) -> DataLoader[Any]:
        share = args[-1] if args else {"rank": 0}
        last = [8] if share["rank"] else [8, 9, 10, 11]
        return DataLoader(Rows(cls.samples()), batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7], last])


@pytest.mark.parametrize(("stages", "schedule"), [(2, "vhalf"), *thorough((3, "1f1b"))])
def test_unequal_microbatches_of_replicas_are_refused(refused: Any, stages: int, schedule: str) -> None:
    """Else replicas would wait for each other for ever, in a V or not."""
    options = {"stages": stages, "data_parallel": 2, "microbatches": 4, "schedule": schedule}
    words = ["data_parallel=2", f"schedule='{schedule}'", "from 1 to 4", "batch 2", "drop_last=True"]
    refused(words, train, 2 * stages, UnequalReplicas, "async", options, use_distributed_sampler=False)


class ReadLate(Deep):
    """The last chunk reads a weight of the first one, from the third update on."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        is_due = self._trainer is not None and self.trainer.global_step >= 2
        return loss + self.net[1][0].weight.square().sum() if is_due else loss


def test_a_parameter_that_another_chunk_begins_to_read_is_not_silently_left_out(launch: Any) -> None:
    options = {"microbatches": 2, "schedule": "vmin"}
    found = launch(train, 2, ReadLate, "async", options, timeout=LIMIT, expect_errors=True)
    assert_refused(found[:1], "RuntimeError", ["'net.1.0.weight'", "in each step"])
    assert_lost(found[1:])
