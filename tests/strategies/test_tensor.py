"""Tensor parallelism has the numbers of a single process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from tests.strategies.equality import assert_equal
from tests.strategies.harness import joined, train
from tests.strategies.models import TOKENS, Base
from tests.strategies.shardable import Mixed
from tests.tensor.models import VOCABULARY, Gained, GainStyle, InSum, Net
from tests.thorough import thorough


class Around(Base):
    """A module that gets tokens, in a LightningModule. Norms, factors and biases don't start as ones and zeros."""

    def __init__(self, make: type[nn.Module]) -> None:
        self.make = make
        super().__init__()

    def build(self) -> None:
        self.model = self.make()
        for parameter in self.model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"] % VOCABULARY
        return F.cross_entropy(self.model(tokens).transpose(1, 2), tokens)


class Encoder(Base):
    """torch's own encoder, which takes a way of its own in evaluation."""

    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, TOKENS)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"]
        padding = tokens.cumsum(1) > 4 * TOKENS
        hidden = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        return F.cross_entropy(self.head(hidden).transpose(1, 2), batch["labels"].masked_fill(padding, -100))


SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
ALL_AT_ONCE: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
OF_GAIN = {"model.up": "column", "model.gain": GainStyle(), "model.down": "row"}
OF_EXPERTS = {"model.mixture": "experts:up=0,down=1"}
OF_ENCODER = {"encoder.layers.*.linear1": "column", "encoder.layers.*.linear2": "row"}


@pytest.mark.parametrize(("model", "ranks", "options", "given"), [
    # Transformers, most by their own plans.
    ("LoraLlama", 4, {}, {}),  # with fewer heads than ranks
    ("LoraGPT2", 2, {}, {}), ("ShardablePhi3", 2, {}, {}), ("LatentExperts", 2, {}, {}), ("PlanlessOPT", 2, {}, {}),
    ("ShardableQwen3", 2, SEQUENCE, ALL_AT_ONCE),
    # Modules written by hand.
    ("Mixed", 3, {}, {"validates_after": True}),
    ("Asks", 2, {}, {}), ("Scaled", 2, {}, {}),  # for code that asks, divided layers are what they were
    ("ByForward", 2, {}, {}),  # which is no read of a divided weight
    (partial(Around, Net), 2, {}, {}),  # a plan is found
    (partial(Around, Gained), 3, {"plan": OF_GAIN}, {}),
    (partial(Around, InSum), 2, {"plan": OF_EXPERTS}, {}),
    (Encoder, 2, {"plan": OF_ENCODER}, {}),
    ("LeNet", 2, {"plan": "none"}, {}),  # nothing divides it
    *thorough(
        ("LoraSavingLlama", 2, {}, {}),
        ("ShardableGPT2", 3, SEQUENCE, {}), ("ShardableGPT2", 4, {}, {}), ("ShardableLlama", 2, SEQUENCE, ALL_AT_ONCE),
        ("LeNet", 2, {}, {}), ("GPT2Untied", 2, {}, {}), ("DemoTransformer", 2, {}, {}),
    ),
])  # fmt: skip
def test_divided_models_train_as_in_one_process(
    launch: Any, single: Any, model: Any, ranks: int, options: dict[str, Any], given: dict[str, Any]
) -> None:
    reports = launch(train, ranks, model, "tensor", options, **given)
    assert bool(reports[0].shards) == (options.get("plan") != "none")
    assert_equal(reports, single(model, **given))


def test_dropout_leaves_the_ranks_with_one_loss_and_one_model(launch: Any) -> None:
    reports = launch(train, 2, "DroppingLoraLlama", "tensor", shuffle=True)
    assert reports[0].losses == reports[1].losses
    joined(reports, "weights")  # asserts that what both hold agrees


# -- what would go wrong without a word --------------------------------------------------------------------------


class Ranks(Mixed):
    """Validates by a divided weight outside of its layer, which is frozen. What it logs is the same on all ranks by
    chance."""

    def build(self) -> None:
        super().build()
        self.mlp[0].weight.requires_grad_(False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("finite", (self.body(batch[0]) @ self.mlp[0].weight.T).isfinite().double().mean())


@pytest.mark.parametrize(("model", "words"), [
    ("ScaledWithoutASum", ["'scale.beta' is whole", "sum_gradient"]),  # its gradient is zero at first
    ("PenalisesShards", ["training_step reads '", "embed_tokens.weight", "weight_decay"]),  # by however little
    (Ranks, ["validation_step reads 'mlp.0.weight'"]),
])  # fmt: skip
def test_what_goes_wrong_on_shards_is_told_by_name(refused: Any, model: Any, words: list[str]) -> None:
    refused(words, train, 2, model, "tensor", max_epochs=2, error=r"\w+Error")


@pytest.mark.parametrize(("model", "told"), [
    ("DrawsByRank", "different values in training_step: 'loss' is"),
    ("DrawsInValidation", "different values in validation_step"),
])  # fmt: skip
@pytest.mark.parametrize(("strategy", "ranks"), [("tensor", 2), *thorough(("sync", 4))])
def test_ranks_that_come_to_different_losses_are_told_both(
    launch: Any, model: str, told: str, strategy: str, ranks: int
) -> None:
    options = {"tensor_parallel": 2} | ({} if strategy == "tensor" else {"microbatches": 2})
    errors = launch(train, ranks, model, strategy, options, expect_errors=True)
    assert len(errors) == ranks and len([error for error in errors if told in str(error)]) >= 2


class LooksAtShards(Mixed):
    """A rate by width, a loss by the number of classes, and numbers of a weight are of shards. Validation keeps what a
    divided layer returns, for the end of the epoch, counts it, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.mean = list[Tensor](), MeanMetric()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [p], "lr": 0.1 / p.shape[0]} for p in self.parameters()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.mlp[0].weight.detach()
        self.log_dict({"norm": weight.norm(), "largest": weight.max()})
        return super().training_step(batch, batch_idx) / self.head.weight.shape[0]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.features.append(self.mlp[0](self.body(batch[0])))
        self.mean.update(self.features[-1])
        # Of these torch takes no norm.
        self.sparse, self.narrow = torch.eye(2).to_sparse(), torch.ones(2).to(torch.float8_e4m3fn)
        return {"features": self.features[-1], "sparse": self.sparse}


def test_what_a_module_asks_logs_and_keeps_of_shards_is_warned_of(launch: Any) -> None:
    report = launch(train, 2, LooksAtShards, "tensor")[0]
    sizes = report.warned_of("asks for the size")
    assert [text.split()[0] for text in sizes] == ["configure_optimizers", "training_step"]
    assert "'mlp.0.weight'" in sizes[0] and "'head.weight'" in sizes[1]
    logged, kept = (report.warned_of(f"keep different values in {kind}_step")[0] for kind in ("training", "validation"))
    assert "'norm'" in logged and "'largest'" in logged
    assert all(name in kept for name in ("'self.features'", "'self.mean.", "'output 0'"))
    for each in launch(train, 2, Mixed, "tensor"):
        assert not each.warned_of("asks for the size", "keep different values")
