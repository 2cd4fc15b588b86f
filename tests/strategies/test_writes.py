"""Parameters that a step or a layer changes in place: as in one process, or refused by name on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.strategies.failures import assert_lost, assert_refused
from tests.strategies.observed import CLASSES, WIDTH, Net, fit


class Halving(nn.Linear):
    """Changes its weight whenever it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(x)


class Masked(nn.Linear):
    """Zeroes a part of its weight, as a masked convolution does; nothing changes in the first step."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        with torch.no_grad():
            self.weight.tril_()

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.tril()
        return super().forward(x)


class ScaledToEvaluate(nn.Linear):
    """Divides its weight when it is evaluated first, and multiplies it when it trains again, as RWKV's layers do."""

    is_scaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_scaled is self.training:
            with torch.no_grad():
                self.weight.mul_(2.0 if self.is_scaled else 0.5)
            self.is_scaled = not self.is_scaled
        return F.linear(x, self.weight * (2.0 if self.is_scaled else 1.0), self.bias)


class Normalised(Net):
    """As SwaV: the prototypes, which lie in no list, are normalised at the beginning of the step."""

    def build(self) -> None:
        self.prototypes = nn.Linear(CLASSES + 1, CLASSES, bias=False)
        self.net[4] = nn.Linear(8, CLASSES + 1)

    def logits(self, inputs: Tensor) -> Tensor:
        return self.prototypes(self.net(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            weight = self.prototypes.weight
            weight.div_(weight.norm(dim=1, keepdim=True))
        return super().training_step(batch, batch_idx)


class Centred(Net):
    """A weight moves by the mean of the batch, at the beginning of the step."""

    def build(self) -> None:
        self.centre = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.centre.lerp_(batch[0].mean(0), 0.5)
        return super().training_step((batch[0] - self.centre, batch[1]), batch_idx)


class Teaching(Net):
    """A teacher of the last layer follows it, entry by entry."""

    def build(self) -> None:
        self.teacher = nn.Linear(8, CLASSES).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.net[-1].weight, 0.5)
        hidden = self.net[:-1](batch[0])
        logits = self.net[-1](hidden)
        return F.cross_entropy(logits, batch[1]) + (logits - self.teacher(hidden)).square().mean()


# The rows of a gradient, by a view, in a hook.
ZeroesRows = type(
    "ZeroesRows", (Net,), {"on_before_optimizer_step": lambda self, _: self.net[2].weight.grad[1:3].zero_()}
)


class ZeroesRow(Net):
    """The row of a weight, which lies in a unit that doesn't run, in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.net[2].weight[0] *= 0.5
        return super().training_step(batch, batch_idx)


class Masks(Net):
    """What the error advises: a mask of rows. And views of columns, which each rank has. A number of a row is read. Its
    units run again in the backward, and not to their ends."""

    def logits(self, inputs: Tensor) -> Tensor:
        for layer in self.net:
            inputs = checkpoint(layer, inputs, use_reentrant=False)
        return inputs

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.net[2].weight
        gradient = weight.grad
        mask = torch.ones(gradient.shape)
        mask[1:3] = 0
        if isinstance(gradient, DTensor):
            mask = distribute_tensor(mask, gradient.device_mesh, gradient.placements)
        gradient.mul_(mask)
        gradient[:, :2].mul_(0.5 if int(weight[0, 0]) == 0 else 2)


class HalvingNet(Net):
    layer: Any = Halving, 8

    def build(self) -> None:
        kind, outputs = self.layer
        self.net[-1 if outputs == CLASSES else 2] = kind(8, outputs)


class Collects(Net):
    """A list grows between the layers, which read its length. It is emptied before the last one, or ``late``: by the
    end of the step, which may leave before that."""

    late = False

    def build(self) -> None:
        self.seen: list[Tensor] = []

    def logits(self, inputs: Tensor) -> Tensor:
        for layer in self.net[:-1]:
            self.seen.append(inputs)
            inputs = layer(inputs * len(self.seen))
        if not self.late:
            self.seen.clear()
        return self.net[-1](inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not loss.isfinite():
            return None
        self.seen.clear()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        assert not self.seen, "it would hold graphs"


class HalvingInValidation(Net):
    """Trains as usual, and evaluates by a layer that changes."""

    def build(self) -> None:
        self.other = nn.Sequential(Halving(WIDTH, CLASSES))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.other(batch[0])


def clamp(self: Net, batch: Any, batch_idx: int) -> Any:
    self.net[0].weight.data.clamp_(-0.01, 0.01)
    return Net.training_step(self, batch, batch_idx)


Clamps = type("Clamps", (Net,), {"training_step": clamp})
OF_PROTOTYPES = {"plan": {"prototypes": "row_split"}}
SHARDED = {"stages": 1, "data_parallel": 2, "data_parallel_kind": "fully_shard", "microbatches": 1}
GIVEN: dict[str, Any] = {"samples": 16, "batch": 8, "validates": True}


@pytest.mark.parametrize(("kind", "strategy", "options", "ranks", "name"), [
    (Normalised, "fsdp", {}, 2, "prototypes.weight"),
    (HalvingNet, "fsdp", {}, 2, "net.2.weight"),
    (HalvingInValidation, "fsdp", {}, 2, "other.0.weight"),
    (ZeroesRow, "fsdp", {}, 2, "net.2.weight"),
    (ZeroesRows, "fsdp", {}, 2, "net.2.weight"),
    (HalvingNet, "sync", SHARDED, 2, "net.2.weight"),
    (HalvingNet, "sync", {"microbatches": 2}, 2, "net.2.weight"),
    (HalvingNet, "sync", {"microbatches": 1, "activation_checkpointing": True}, 2, "net.2.weight"),
    (HalvingNet, "sync", {"stages": 1, "microbatches": 1, "activation_checkpointing": True}, 1, "net.2.weight"),
    (partial(HalvingNet, layer=(Masked, 8)), "async", {"microbatches": 1}, 2, "net.2.weight"),
    (Normalised, "tensor", OF_PROTOTYPES, 2, "prototypes.weight"),
])  # fmt: skip
def test_a_write_that_would_be_lost_or_repeated_is_refused_by_name(
    refused: Any, kind: Any, strategy: str, options: dict[str, Any], ranks: int, name: str
) -> None:
    refused([name, "in place"], fit, ranks, kind, strategy, options, **GIVEN)


def test_a_write_by_what_is_in_a_microbatch_is_refused_in_the_first_batch(launch: Any) -> None:
    failures = launch(fit, 2, Centred, "sync", {"microbatches": 2}, expect_errors=True, **GIVEN)
    assert_refused([next(each for each in failures if "centre" in str(each))], "RuntimeError", ["microbatches=1"])


def test_the_stage_that_writes_into_parts_names_them(launch: Any) -> None:
    options = OF_PROTOTYPES | {"stages": 2, "tensor_parallel": 2, "microbatches": 1}
    failures = launch(fit, 4, Normalised, "sync", options, expect_errors=True, **GIVEN)
    assert_refused(failures[:2], "ValueError", ["prototypes.weight", "in place"])
    assert_lost(failures[2:])


@pytest.mark.parametrize(("kind", "strategy", "options"), [
    (Normalised, "sync", {"microbatches": 4, "schedule": "zbv"}),
    (Centred, "sync", {"microbatches": 1}),
    (Collects, "sync", {"microbatches": 4}),
    (partial(Collects, late=True), "sync", {"microbatches": 4}),
    (Collects, "sync", {"microbatches": 4, "schedule": "zbv"}),
    (HalvingNet, "sync", {"microbatches": 1}),
    (HalvingInValidation, "sync", {"microbatches": 2}),
    # The layer is on the last stage, which tries losses in evaluation mode.
    (partial(HalvingNet, layer=(ScaledToEvaluate, CLASSES)), "sync", {"microbatches": 4}),
    (Masks, "fsdp", {}),
    (Clamps, "data", {}),  # which is the same on each replica
    (Teaching, "tensor", {"plan": {"net.4": "row_split", "teacher": "row_split"}}),
])  # fmt: skip
def test_other_writes_are_as_in_one_process(
    launch: Any, kind: type[Net], strategy: str, options: dict[str, Any]
) -> None:
    (expected,) = launch(fit, 1, kind, **GIVEN)
    ranks, given = (1, {"devices": 2}) if strategy == "data" else (2, {})
    first, *_ = launch(fit, ranks, kind, strategy, options, **GIVEN, **given)
    assert first.losses == pytest.approx(expected.losses, 1e-12)
