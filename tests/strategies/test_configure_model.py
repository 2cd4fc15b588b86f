"""A model that configure_model() makes, or trainer.init_module(), has the numbers of one process, and its ranks hold
their own parts of it only."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel import disk_offload
from tests.strategies.harness import Report, here, joined, largest_difference, make_trainer, train
from tests.strategies.models import BATCH, GPT2, LeNet
from tests.test_disk_offload import mapped_files
from tests.thorough import thorough

EXACT = 1e-12  # float64


class MadeLate:
    """A model that makes its layers in configure_model()."""

    made = False

    def build(self) -> None:
        pass

    def configure_model(self: Any) -> None:
        if not self.made:
            self.made = True
            torch.manual_seed(7)
            super().build()  # type: ignore[misc]
            assert mapped_files() > 0


LateGPT2 = type("LateGPT2", (MadeLate, GPT2), {})  # two layers are tied


LateLeNet = type("LateLeNet", (MadeLate, LeNet), {})


class InMemory(Callback):
    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert mapped_files() == 0


def trained(model: type[Any], *arguments: Any, **options: Any) -> Report:
    with patch.object(disk_offload, "LARGE", 1):
        return train(model, *arguments, callbacks=[InMemory()], **options)


@pytest.mark.parametrize(("model", "strategy", "ranks", "options"), [
    (LateLeNet, "sync", 2, {"schedule": "zbv"}),
    (LateGPT2, "tensor", 2, {}),
    (LateLeNet, "fsdp", 2, {}),
    *thorough((LateGPT2, "sync", 4, {"tensor_parallel": 2}), (LateGPT2, "fsdp", 2, {}),
              (LateGPT2, "sync", 4, {"data_parallel": 2, "data_parallel_kind": "fully_shard"})),
], ids=str)  # fmt: skip
def test_a_model_made_in_configure_model_trains_as_in_one_process(
    launch: Any, single: Any, model: type[Any], strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    replicas = ranks if strategy == "fsdp" else options.get("data_parallel", 1)
    samples = 20  # which replicas can share
    reports = launch(trained, ranks, model, strategy, options, batch_size=BATCH // replicas, samples=samples)
    reference = single(model.__bases__[1].__name__, samples=samples)
    assert len(reports[0].gradients) == len(reference.gradients)
    if "fully_shard" not in options.values():  # there, ranks' gradients are of their own parts
        for update, gradients in enumerate(reference.gradients):
            assert largest_difference(joined(reports, "gradients", update), gradients) < EXACT
    assert largest_difference(joined(reports, "weights"), reference.weights) < EXACT


def initialised_by_the_trainer() -> dict[str, Tensor]:
    with patch.object(disk_offload, "LARGE", 1):
        trainer = make_trainer("sync", [InMemory()], {}, max_epochs=1, limit_train_batches=1)
        with trainer.init_module():
            module = LeNet()
        assert mapped_files() > 0
        trainer.fit(module, LeNet.loader())
    return {name: parameter.detach() for name, parameter in here(module).items()}


def test_so_does_one_that_the_trainer_initialises(launch: Any, single: Any) -> None:
    first, second = launch(initialised_by_the_trainer, 2)
    reference = single("LeNet", max_epochs=1, limit_train_batches=1).weights
    assert largest_difference(first | second, reference) < EXACT
