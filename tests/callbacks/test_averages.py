"""Averages of weights: under every layout those of one process, in validation, at the end, and from a checkpoint on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.checkpoint import convert, read_plain
from tests.checkpoint.moved import AVERAGES, LAYOUTS, TOLERANCE, FromThird, Moved, Runs, trainer_of
from tests.strategies.failures import assert_refused
from tests.strategies.harness import complete, largest_difference
from tests.thorough import thorough
from tools.workers.pool import WorkerPool


class Averaged(Moved):
    """With a tied weight, a scalar parameter, and buffers by names that the averages themselves could use."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.head.scale = nn.Parameter(torch.ones(()))
        for name in ("source", "held"):
            self.register_buffer(name, torch.zeros(2))

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.head.scale


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("averages"), Averaged)


def tensors_in(content: Any, prefix: str = "") -> dict[str, Any]:
    """All tensors and numbers of a checkpoint that concern weights, by their places."""
    if isinstance(content, dict):
        return {k: v for key, value in content.items() for k, v in tensors_in(value, f"{prefix}/{key}").items()}
    return {prefix: torch.as_tensor(content).double()} if isinstance(content, Tensor | int | float) else {}


KEYS = ("state_dict", "current_model_state", "averaging_state", "callbacks", "global_step")


def saved_in(path: Path) -> dict[str, Any]:
    content = read_plain(path, weights_only=False)
    return tensors_in({key: content[key] for key in KEYS if key in content})


def assert_same(one: tuple[Path, Path, list[float]], other: tuple[Path, Path, list[float]]) -> None:
    assert one[2] == pytest.approx(other[2], abs=TOLERANCE, rel=0)
    for mine, theirs in zip(one[:2], other[:2], strict=True):
        if mine.exists():
            assert largest_difference(saved_in(mine), saved_in(theirs)) < TOLERANCE


TYING = [name for name in LAYOUTS if name not in ("pp3", "async2")]  # async2 refuses tied weights
MOVES = [
    ("ema", "pp2", "tp2"), ("ema", "single", "fsdp2"), ("ema", "single", "zbv"), ("ema", "fsdp2", "single"),
    ("swa", "pp2", "single"), ("multi", "tp2", "single"),
]  # fmt: skip
MORE = [
    (average, *pair)
    for average, pair in product(("ema", "swa", "multi"), permutations(TYING, 2))
    if "single" in pair or pair == ("fsdp2", "tp2 x pp2")
]


@pytest.mark.parametrize(("average", "source", "target"), [*MOVES, *thorough(*(m for m in MORE if m not in MOVES))])
def test_averages_are_those_of_one_process_and_go_on_under_another_layout(
    runs: Runs, average: str, source: str, target: str
) -> None:
    first, one = runs.run(average, source), runs.run(average, "single")
    assert_same(first, one)
    _, end, validated = runs.run(average, target, first[0])
    _, expected, of_whole_run = one
    assert largest_difference(saved_in(end), saved_in(expected)) < TOLERANCE
    assert validated[-3:-1] == pytest.approx(of_whole_run[-3:-1], abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("layout", ["pp2", *thorough("tp2", "fsdp2")])
@pytest.mark.parametrize(("before", "after"), [("none", "ema"), *thorough(("ema", "none"))])
def test_averages_begin_or_end_with_a_checkpoint(runs: Runs, before: str, after: str, layout: str) -> None:
    """As in one process: the averages become the weights, or begin with the weights."""
    expected = runs.run(after, "single", runs.run(before, "single")[0])
    assert_same(runs.run(after, layout, runs.run(before, layout)[0]), expected)


def test_a_directory_with_averages_is_converted(runs: Runs, tmp_path: Path) -> None:
    middle = runs.run("ema", "pp2")[0]
    convert(middle, tmp_path / "one.ckpt")
    content = torch.load(tmp_path / "one.ckpt")
    assert content["current_model_state"].keys() == content["state_dict"].keys() == Averaged().state_dict().keys()
    assert_same((tmp_path / "one.ckpt", *runs.run("ema", "pp2")[1:]), runs.run("ema", "single"))


def counts(layout: str) -> dict[str, Tensor]:
    """What a rank has of the averages of buffers that a hook counts up."""
    torch.set_default_dtype(torch.float64)
    trainer = trainer_of(layout, *AVERAGES["ema"](), max_epochs=1)
    trainer.fit(Moved())
    state = trainer._checkpoint_connector.dump_checkpoint()["state_dict"]
    return {name: value for name, value in state.items() if name.endswith("calls")}


def test_a_late_stage_averages_the_buffers_of_the_batch(pool: WorkerPool) -> None:
    first, last = pool.run(counts, 2, "async2", init=False)
    assert {**first, **last} == pool.run(counts, 1, "single", init=False)[0]


# -- torch's AveragedModel, held by the user's own code --------------------------------------------------------------


class OnModule(Moved):
    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.first, avg_fn=get_ema_avg_fn(0.8))

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(self.first)


class InCallback(Callback):
    average: AveragedModel

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.average = AveragedModel(pl_module, avg_fn=get_ema_avg_fn(0.8))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.average.update_parameters(pl_module)


def own(where: str, layout: str) -> dict[str, Tensor]:
    """The averages of the first block, as far as they are whole here."""
    torch.set_default_dtype(torch.float64)
    module = OnModule() if where == "module" else Moved()
    callbacks: list[Callback] = [] if where == "module" else [InCallback()]
    trainer = trainer_of(layout, *callbacks, max_epochs=1)
    trainer.fit(module)
    holder: Any = module if where == "module" else callbacks[0]
    block = getattr(holder.average.module, "first", holder.average.module)
    shards = trainer.strategy.local_model.shards if layout != "single" else {}  # type: ignore[attr-defined]
    named = {name: each for name, each in block.named_parameters() if f"first.{name}" not in shards}
    return {name: complete(each.detach()) for name, each in named.items() if not isinstance(each, AbsentTensor)}


@pytest.mark.parametrize(("where", "layout"), [
    ("module", "fsdp2"), ("callback", "pp2"), ("callback", "tp2"),
    *thorough(("callback", "tp2 x pp2"), ("callback", "dp2 x pp2"), ("module", "late"), ("module", "replicas")),
])  # fmt: skip
def test_averages_of_the_users_own_are_those_of_one_process(pool: WorkerPool, where: str, layout: str) -> None:
    [expected] = pool.run(own, 1, where, "single", init=False)
    ranks = pool.run(own, LAYOUTS[layout][0], where, layout, init=False)
    assert any(ranks)
    for found in filter(None, ranks):
        assert largest_difference(found, {name: expected[name] for name in found}) < TOLERANCE


@pytest.mark.parametrize(("where", "layout", "error"), [
    ("module", "pp2", ["ValueError", "average.n_averaged"]),
    ("module", "tp2", ["ValueError", "average", "AveragedModel", "first.up.weight"]),
    ("callback", "async2", ["ValueError", "InCallback.average", "EMAWeightAveraging"]),
])  # fmt: skip
def test_averages_of_the_users_own_fail_otherwise(pool: WorkerPool, where: str, layout: str, error: list[str]) -> None:
    assert_refused(pool.run(own, 2, where, layout, init=False, expect_errors=True), error[0], error[1:])


# -- refusals ----------------------------------------------------------------------------------------------------


def slowly(averaged: Tensor, current: Tensor, count: Any) -> Tensor:
    return averaged.lerp(current, 0.2)


STRANGE: dict[str, Callable[[], list[Callback]]] = {
    "own": lambda: [WeightAveraging(avg_fn=slowly)],
    "own of all": lambda: [WeightAveraging(multi_avg_fn=slowly)],
    "two": lambda: [EMAWeightAveraging(), FromThird()],
}


def strange(average: str, layout: Any) -> None:
    torch.set_default_dtype(torch.float64)
    trainer_of(layout, *STRANGE[average](), max_epochs=1).fit(Averaged())


@pytest.mark.parametrize(("average", "layout", "word"), [
    ("own", "tp2", "get_ema_avg_fn"), ("own of all", "pp2", "get_ema_avg_fn"), ("own", "fsdp2", "get_ema_avg_fn"),
    ("two", "pp2", "EMAWeightAveraging and FromThird"),
])  # fmt: skip
def test_averages_that_parts_would_change_are_refused(pool: WorkerPool, average: str, layout: str, word: str) -> None:
    assert_refused(pool.run(strange, 2, average, layout, init=False, expect_errors=True), "ValueError", [word])
