"""Shards of the model on every rank have together the numbers of a single process with the whole batch."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.strategies.equality import EXACT, assert_equal
from tests.strategies.harness import ALL, make_trainer, train, weights_of
from tests.strategies.models import BATCH, LENGTH, Blocks, Gate, LeNet


class LogsReplica(LeNet):
    """What one replica logs is joined in each way to the same number, 0, and the other replica's is not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("replica", float(self.global_rank % 2))
        return super().training_step(batch, batch_idx)


def test_no_replica_gathers_layers_alone_to_join_what_it_logs(launch: Any) -> None:
    options = {"stages": 2, "data_parallel": 2, "data_parallel_kind": "fully_shard", "microbatches": 2}
    reports = launch(train, 4, LogsReplica, "sync", options, batch_size=BATCH // 2)
    assert [report.metrics["replica"] for report in reports] == [0, 1, 0, 1]


# -- what a rank holds -------------------------------------------------------------------------------------------


class Weigher(Callback):
    """Bytes of parameters, gradients and optimizer state on this rank, before an update; parameters during a step."""

    def __init__(self) -> None:
        self.held = dict.fromkeys(("parameters", "gradients", "state"), 0)
        self.gathered: list[int] = []

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        blocks = module.model.transformer.h
        blocks[1].register_forward_hook(lambda *_: self.gathered.append(size(blocks.parameters())))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        (optimizer,) = trainer.optimizers
        self.held["parameters"] = size(module.parameters())
        self.held["state"] = size(v for values in optimizer.state.values() for v in values.values() if v.dim())

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.held["gradients"] = size(p.grad for p in module.parameters())


def size(tensors: Iterable[Tensor]) -> int:
    """Of their memory, which a unit's gradients share."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (tensor.untyped_storage() for tensor in local)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weigh() -> tuple[dict[str, int], int]:
    weigher = Weigher()
    train("GPT2", "fsdp", callbacks=[weigher])
    return weigher.held, max(weigher.gathered)


def test_a_rank_holds_its_share_and_only_one_block_whole_at_a_time(launch: Any) -> None:
    parameters = list(ALL["GPT2"]().parameters())
    whole = 8 * sum(p.numel() for p in parameters)
    padding = 8 * sum(p[0].numel() for p in parameters)  # rows that fill up what the ranks don't divide
    blocks = [8 * sum(p.numel() for p in b.parameters()) for b in ALL["GPT2"]().model.transformer.h]
    for held, gathered in launch(weigh, 4):
        assert whole / 4 <= held["parameters"] <= whole / 4 + padding
        assert held["state"] < 2.05 * whole / 4 + 2 * padding
        assert held["gradients"] < 1.05 * whole / 4 + padding
        assert gathered < blocks[0] + 1.1 * sum(blocks[1:]) / 4


# -- numbers of parts --------------------------------------------------------------------------------------------


class ReadsNumbers(Blocks):
    """Whatever decides by a number of a weight or of a gradient does so by that of the whole, in each place. Ranks are
    given weights of their own, until the strategy makes them equal."""

    def build(self) -> None:
        super().build()
        for parameter in self.parameters():
            parameter.data.add_(int(os.environ.get("RANK", 0)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.blocks[0].mix.weight.norm().item())

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": 0.01 * (1 + float(p.detach().abs().mean()))} for p in self.parameters()]
        return torch.optim.AdamW(groups)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = sum(p.grad.norm().item() ** 2 for p in self.parameters() if p.grad is not None) ** 0.5
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5 / norm)
                if p.grad.abs().max() > 0.1:
                    p.grad.clamp_(-0.1, 0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        weight = self.blocks[1].mix.weight.detach()
        weight.mul_(min(1.0, 2 / weight.norm().item()))
        self.log("number", weight.sum().item())
        self.log("largest", weight.max(), prog_bar=True, on_step=True, on_epoch=True)  # which one rank's bar reads


def test_a_number_of_a_weight_is_that_of_the_whole(launch: Any) -> None:
    (expected,) = launch(train, 1, ReadsNumbers, enable_progress_bar=True)
    given = {"batch_size": BATCH // 2, "enable_progress_bar": True}
    reports = launch(train, 2, ReadsNumbers, "fsdp", {"units": ["blocks.*", "head"]}, **given)
    assert_equal(reports, expected, replicas=2)
    for report in reports:
        for name in ("number", "largest_step", "largest_epoch"):
            assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=0, abs=EXACT)


# -- models that are built on the meta device --------------------------------------------------------------------


class First(Callback):
    """The weights and the statistics before training."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.weights = weights_of(module)
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}


class OnMeta(LeNet):
    """With two layers tied."""

    def build(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(
                nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32),
                nn.Linear(32, 10),
            )  # fmt: skip
        self.net[5].weight = self.net[3].weight


class GateOnMeta(OnMeta):
    """With a parameter that nothing initialises."""

    def build(self) -> None:
        super().build()
        with torch.device("meta"):
            self.net.append(Gate(10))


def on_meta() -> dict[str, Any]:
    module, first = OnMeta(), First()
    make_trainer("fsdp", [first], {}).fit(module, module.loader(), module.loader())
    return {"weights": first.weights, "variance": first.buffers["net.2.running_var"]}


def test_modules_on_the_meta_device_initialise_themselves(launch: Any) -> None:
    for rank in launch(on_meta, 2):
        weight = rank["weights"]["net.1.weight"]
        assert weight.abs().max() <= 1 / 64**0.5
        assert weight.unique().numel() == weight.numel()  # no shard repeats another
        assert torch.equal(rank["weights"]["net.3.weight"], rank["weights"]["net.5.weight"])
        assert torch.equal(rank["variance"], torch.ones(32))


# -- bad input ---------------------------------------------------------------------------------------------------


class TwoKinds(LeNet):
    def build(self) -> None:
        super().build()
        self.net[7].bias.data = self.net[7].bias.data.float()


class Borrowed(Blocks):
    """Uses a block's weight where the block does not run."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.blocks[0].mix.weight.square().sum()


class Fork(nn.Module):
    """Two ways of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(LENGTH, LENGTH) for _ in range(2))

    def forward(self, x: Tensor, way: int) -> Tensor:
        out: Tensor = torch.tanh(self.ways[way](x))
        return out


class Branching(LeNet):
    """From the second batch on, each replica takes a way of its own.

    Args:
        branches: between units, or inside one; "together": all replicas take another way.
    """

    def __init__(self, branches: str) -> None:
        super().__init__()
        self.branches = branches

    def build(self) -> None:
        self.net = nn.ModuleList(Fork() for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, way = batch[0].flatten(1)[:, :LENGTH], min(1, batch_idx)
        own = way * self.global_rank
        first = own if self.branches == "between" else way if self.branches == "together" else 0
        x = self.net[first](x, own if self.branches == "inside" else 0)
        return self.net[2](x, way if self.branches == "together" else 0).pow(2).mean()


# Its example is a property.
WithExamples = type(
    "WithExamples", (Blocks,), {"example_input_array": property(lambda self: torch.zeros(2, LENGTH, dtype=torch.int64))}
)


def fit(model: Any, options: dict[str, Any], trainers: int = 1, summary: bool = False) -> None:
    module = model()
    for _ in range(trainers):
        os.environ["WORLD_SIZE"] = "2"  # a Trainer that ends deletes it
        trainer = make_trainer("fsdp", [], options, max_epochs=1, limit_train_batches=2, enable_model_summary=summary)
        trainer.fit(module, module.loader())


@pytest.mark.parametrize(("arguments", "words"), [
    ((GateOnMeta, {}), ["net.7", "Gate", "scale", "reset_parameters"]),
    ((TwoKinds, {}), ["net.7", "float32, torch.float64", "units"]),
    ((Borrowed, {}), ["while it was sharded", "by default the layers of lists are units", "strategy='ddp'"]),
    ((Blocks, {"data_parallel": 3}), ["data_parallel=3", "devices"]),
    ((Blocks, {}, 2), ["sharded already", "checkpoint"]),
    ((WithExamples, {}, 1, True), ["example_input_array", "enable_model_summary=False"]),
    # Replicas use different modules of one size.
    ((partial(Branching, "between"), {}), ["replica 0 used 'net.0', replica 1 used 'net.1'"]),
    ((partial(Branching, "inside"), {}), ["0 used 'net.0.ways.0.bias', replica 1 used 'net.0.ways.1.bias'"]),
], ids=lambda value: "-".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_is_refused_in_words(refused: Any, arguments: tuple[Any, ...], words: list[str]) -> None:
    refused(words, fit, 2, *arguments, error=r"\w+Error")


class WithExample(Blocks):
    """Lightning's summary would run it on this."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.int64)

    def forward(self, tokens: Tensor) -> Any:
        return self.loss({"input_ids": tokens, "labels": tokens})


def summarised_and_copied() -> list[Any]:
    module, told = WithExample(), list[Any]()
    example = module.example_input_array
    make_trainer("fsdp", [], {}, max_epochs=1, enable_model_summary=True).fit(module, module.loader())
    for make in (copy.deepcopy, pickle.dumps):
        try:
            make(module)  # type: ignore[operator]
        except RuntimeError as error:
            told.append("trainer.save_checkpoint" in str(error))
    return [*told, module.example_input_array is example]


def test_a_module_is_summarised_before_training_and_not_copied_after(launch: Any) -> None:
    assert launch(summarised_and_copied, 2) == [[True] * 3] * 2


@pytest.mark.parametrize("model", [WithExamples, partial(Branching, "together")])
def test_an_example_without_a_summary_and_another_way_of_all_replicas_are_allowed(launch: Any, model: Any) -> None:
    launch(fit, 2, model, {})
