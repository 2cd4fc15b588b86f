"""Asynchronous pipelines have the numbers of delayed gradients, and no others."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_parallel.ranks.groups import Groups
from tests.pipeline.test_no_host_reads import announced
from tests.strategies.equality import EXACT
from tests.strategies.harness import Report, joined, largest_difference, make_trainer, train
from tests.strategies.models import MODELS
from tests.strategies.reference import assert_equals_delayed, delayed
from tests.strategies.test_asynchronous_v import CASES as IN_A_V
from tests.strategies.test_asynchronous_v import Skips, Uneven
from tests.thorough import thorough


class Twice(torch.nn.Module):
    """A layer with two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = torch.nn.Parameter(torch.randn(32, 32) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.one).tanh() @ self.other


class TiedInside(MODELS["LeNet"]):  # type: ignore[misc]
    def build(self) -> None:
        super().build()
        self.net.insert(7, Twice())


CLIP: dict[str, Any] = {"gradient_clip_val": 0.05}
RECOMPUTED = {"activation_checkpointing": True}

# Model, stages, microbatches a batch, options of the strategy (and of the reference), of the Trainer.
CASES: list[Any] = [
    ("LeNet", 3, 2, {"weights": "latest"}, {}),
    ("LeNet", 3, 1, {"lr_discount": 4, "correction": None}, {}),
    ("LeNet", 3, 1, {"extra_in_flight": 1, "correction": 0.5}, {"accumulate_grad_batches": 2, **CLIP}),
    ("Blocks", 3, 2, RECOMPUTED, {}),  # loose parameters
    (TiedInside, 3, 2, {}, {}),
    # One batch is too small for two versions. It drains the pipeline of 2BW: the batch after it would need a version
    # that no stage has yet.
    (Uneven, 4, 4, {"weights": "2bw"}, {}),
    *thorough(
        ("GPT2Untied", 4, 1, {"correction": "error_feedback"}, {}),
        ("Llama", 3, 3, {}, CLIP),
        ("LeNet", 3, 1, {"weights": "2bw"}, {"accumulate_grad_batches": 2}),
        ("DemoTransformer", 3, 2, RECOMPUTED, {}),
    ),
]


@pytest.mark.parametrize(("model", "stages", "microbatches", "options", "trainer_options"), [*CASES, *IN_A_V])
def test_training_equals_delayed_gradients_to_the_bit(
    launch: Any, model: Any, stages: int, microbatches: int, options: Any, trainer_options: Any
) -> None:
    # What crosses a cut of an encoder, or of Skips, is read on several stages, whose gradients are summed stage by
    # stage first. So are those of ranks, and parts of norms.
    is_summed = model in ("DemoTransformer", Skips) or "gradient_clip_val" in trainer_options
    allowed = EXACT if is_summed or "tensor_parallel" in options else 0
    assert_equals_delayed(launch, model, stages, microbatches, options, trainer_options, allowed=allowed)


def train_announced(*args: Any, **given: Any) -> Report:
    """With messages as they are over NCCL. Those of a synchronous pipeline are in test_post_validation.py."""
    wires = Groups.wires
    with mock.patch.object(Groups, "wires", lambda groups, placement: announced(wires(groups, placement))):
        return train(*args, **given)


def test_an_endless_list_ends_where_messages_are_announced(launch: Any) -> None:
    options = {"microbatches": 2}
    found, expected = (launch(which, 2, "Blocks", "async", options) for which in (train_announced, train))
    assert found[0].losses == expected[0].losses
    assert largest_difference(joined(found, "weights"), joined(expected, "weights")) == 0


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
    module, seen = MODELS["LeNet"](), list[int]()
    step = module.training_step

    def watched(batch: Any, batch_idx: int) -> Any:
        if torch.is_grad_enabled():  # else two microbatches are tried as one
            seen.append(len(batch[0]))
        return step(batch, batch_idx)

    module.training_step = watched  # type: ignore[method-assign]
    trainer = make_trainer("async", [], {}, limit_train_batches=1, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, MODELS["LeNet"].loader(batch_size=batch_size))
    return seen


@pytest.mark.parametrize(("stages", "batch_size", "accumulate", "expected"), [
    (2, 11, 1, [3, 3, 3, 2]),  # two a stage
    (2, 12, 2, [6] * 2),  # of an update, which has two batches
    (1, 12, 1, [12]),
])  # fmt: skip
def test_an_update_has_two_microbatches_a_stage_where_there_are_samples(
    launch: Any, stages: int, batch_size: int, accumulate: int, expected: list[int]
) -> None:
    runs = launch(sizes_of_microbatches, stages, batch_size, accumulate)
    first = runs[-1]  # the first stage's; on the last one, losses are tried too
    assert first[-len(expected) :] == expected
    assert set(first[: -len(expected)]) <= {expected[0]}  # dry runs of the step; one stage has none


@pytest.mark.parametrize(("options", "warns"), [({"microbatches": 1}, True), ({}, False)])
def test_a_setting_that_trains_badly_is_warned_of_once_with_figures(
    launch: Any, options: dict[str, Any], warns: bool
) -> None:
    reports = launch(train, 3, "LeNet", "async", options)
    told, *others = (report.warned_of("updates late") for report in reports)
    assert len(told) == warns and not any(others)
    assert all("microbatches='auto' with at least 6 samples" in text for text in told)


# -- what follows an update late -------------------------------------------------------------------------------------


class UsedLate(MODELS["LeNet"]):  # type: ignore[misc]
    """A loose parameter whose first gradient comes after the first update."""

    def build(self) -> None:
        super().build()
        self.late = torch.nn.Parameter(torch.ones(()))

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss * self.late if self.trainer.global_step > 1 else loss


def test_a_loose_parameter_first_used_after_the_first_update_is_equal_on_all_stages(launch: Any) -> None:
    reports = launch(train, 3, UsedLate, "async", {"microbatches": 2}, max_epochs=2)
    [late] = {float(report.weights["late"]) for report in reports}
    assert late != 1


class Replacing(MODELS["Blocks"]):  # type: ignore[misc]
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
