"""The asynchronous pipeline in a V has the numbers of delayed gradients, each chunk's as late as its list says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.strategies.failures import LIMIT, assert_lost, assert_refused
from tests.strategies.harness import joined, largest_difference, train
from tests.strategies.models import MODELS, Rows
from tests.strategies.reference import assert_equals_delayed, delayed
from tests.thorough import thorough


class Deep(MODELS["LeNet"]):  # type: ignore[misc]
    """Chunks for five stages."""

    def build(self) -> None:
        sizes = [64, *[12] * 9, 10]
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.net = nn.Sequential(nn.Flatten(), *layers)


class Skips(MODELS["LeNet"]):  # type: ignore[misc]
    """The first layers' outputs go to the last ones, as in a U-Net; the stage that has both keeps one in reach."""

    def build(self) -> None:
        self.inner = nn.ModuleList(nn.Linear(64 if i == 0 else 12, 12) for i in range(4))
        self.outer = nn.ModuleList(nn.Linear(24, 12) for _ in range(3))
        self.head = nn.Linear(12, 10)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        x, kept = images.flatten(1), []
        for layer in self.inner:
            x = layer(x).tanh()
            kept.append(x)
        for layer, skip in zip(self.outer, reversed(kept[:-1]), strict=True):
            x = layer(torch.cat([x, skip], 1)).tanh()
        return F.cross_entropy(self.head(x), labels)


class Sixteen(Deep):
    """Two replicas' microbatches together are those of one process: each has every other sample."""

    @classmethod
    def samples(cls) -> list[Any]:
        return super().samples()[:16]  # type: ignore[no-any-return]


class Uneven(Deep):
    """Batches of one to four samples."""

    @classmethod
    def loader(cls, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        batches = [[0, 1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15], [16, 17]]
        return DataLoader(Rows(cls.samples()), batch_sampler=batches)


CLIP = {"gradient_clip_val": 0.05}  # the norm is that of a chunk

# Rows of the table in test_pipeline_async.py.
CASES: list[Any] = [
    (Deep, 2, 2, {"schedule": "vhalf", "correction": "error_feedback"}, {"accumulate_grad_batches": 2}),
    (Uneven, 3, 4, {"schedule": "vhalf"}, {}),
    (Skips, 2, 2, {"schedule": "vmin"}, {}),
    ("GPT2", 2, 2, {"schedule": "vmin"}, {}),  # embedding and head are tied
    ("Blocks", 2, 2, {"schedule": "vmin"}, {}),  # loose parameters
    (Sixteen, 2, 2, {"schedule": "vhalf", "data_parallel": 2, "activation_checkpointing": True}, CLIP),
    *thorough(
        ("LeNet", 3, 1, {"schedule": "vmin"}, {}),
        (Deep, 5, 1, {"schedule": "vmin"}, {}),
        (Deep, 3, 1, {"schedule": "vhalf", "lr_discount": 4, "correction": 0.5}, {}),
        ("Llama", 2, 2, {"schedule": "vmin", "tensor_parallel": 2}, {}),
        ("GPT2", 2, 4, {"schedule": "vhalf"}, {"accumulate_grad_batches": 2}),
        (Uneven, 4, 4, {"schedule": "vmin", "correction": "error_feedback"}, {}),
    ),
]


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


# -- refused ----------------------------------------------------------------------------------------------------------


class OwnAverages(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = AveragedModel(module)


@pytest.mark.parametrize(("model", "callbacks", "words"), [
    ("LeNet", [OwnAverages()], ["OwnAverages.average", "Use PipelineStrategy"]),
    ("LeNet", [EMAWeightAveraging], ["EMAWeightAveraging", "schedule='vmin'", "schedule='1f1b'"]),
    ("SharedPart", [], ["blocks.0.mix", "PipelineStrategy"]),  # on two stages in a V too
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(refused: Any, model: str, callbacks: Any, words: list[str]) -> None:
    refused(words, train, 3, model, "async", {"microbatches": 2, "schedule": "vmin"}, callbacks=callbacks)


class Counting(torch.optim.SGD):
    """Keeps the number of its steps among its options, and takes smaller steps by it."""

    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.data.sub_(parameter.grad, alpha=group["lr"] / group["count"])
        return result


class Counted(Deep):
    def configure_optimizers(self) -> Any:
        optimizer = Counting(self.parameters(), lr=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 99)}}


def test_an_optimizer_that_counts_its_steps_for_all_parameters_is_refused(launch: Any, refused: Any) -> None:
    words = ["Counting", "schedule='vmin'", "parameter group 0", "schedule='1f1b'"]
    refused(words, train, 2, Counted, "async", {"microbatches": 1, "schedule": "vmin"})
    assert_equals_delayed(launch, Counted, 2, 1, {}, {})


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
