"""Synchronous pipelines have the numbers of a single process: with any schedule, one's own too, and all other axes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel import PipelineStrategy
from lightning_parallel.schedules.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    Step,
    needed,
    sent,
)
from lightning_parallel.schedules.generators import interleaved, one_f_one_b
from lightning_parallel.schedules.v_shaped import zbv
from tests.strategies.equality import assert_equal
from tests.strategies.harness import make_trainer, train
from tests.strategies.models import BATCH, MODELS, Deep, Skips
from tests.strategies.test_loss_means import OfRows
from tests.thorough import thorough

# -- schedules of one's own ------------------------------------------------------------------------------------------

_LAYERS = 8  # of the models: there are no more chunks


def any_order(stages: int, microbatches: int, seed: int) -> Schedule:
    """Valid lists without any plan: two or three chunks a stage anywhere, of which one that can run is drawn each
    time; backwards whole or in halves."""
    draw = random.Random(seed)
    places = [stage for stage in range(stages) for _ in range(draw.choice([2, 3]))][:_LAYERS]
    places.remove(stages - 1)
    draw.shuffle(places)
    places.append(stages - 1)  # the last chunk
    chunks, lists, done = len(places), [list[Any]() for _ in range(stages)], {None}
    kinds: list[Any] = [Forward, BackwardInput, BackwardWeight]
    before = {Forward: lambda *_: None, BackwardInput: Forward, BackwardWeight: BackwardInput}
    waiting: list[Any] = [kind(chunk, k) for kind in kinds for chunk in range(chunks) for k in range(microbatches)]
    while waiting:
        first = {(type(a), a.chunk): a for a in reversed(waiting)}
        needs = {a: {needed(a, chunks), before[type(a)](a.chunk, a.microbatch)} for a in first.values()}
        action = draw.choice([each for each in needs if needs[each] <= done])
        waiting.remove(action)
        done |= {action, sent(action, chunks)}
        if isinstance(action, BackwardInput) and draw.random() < 0.5:
            waiting.remove(BackwardWeight(action.chunk, action.microbatch))
            action = Backward(action.chunk, action.microbatch)
        lists[places[action.chunk]].append(action)
    return [[*actions, Step(stage, 0)] for stage, actions in enumerate(lists)]


def breadth_first(stages: int, microbatches: int) -> Schedule:
    """All forwards of a chunk, then those of the stage's next chunk, then the backwards."""
    return [
        [
            *(Forward(c, k) for c in (s, s + stages) for k in range(microbatches)),
            *(Backward(c, k) for c in (s + stages, s) for k in range(microbatches)),
            Step(s, 0),
        ]
        for s in range(stages)
    ]


def weights_last(stages: int, microbatches: int) -> Schedule:
    """All forwards, all first halves of backwards, then all second ones."""
    kinds = (Forward, BackwardInput, BackwardWeight)
    return [[*(kind(s, k) for kind in kinds for k in range(microbatches)), Step(s, 0)] for s in range(stages)]


@dataclass
class Own:
    """Python gives no hash to a dataclass that can change."""

    make: Any

    def __call__(self, stages: int, microbatches: int) -> Schedule:
        return self.make(stages, microbatches)  # type: ignore[no-any-return]


def forgetful(stages: int, microbatches: int) -> Schedule:
    return one_f_one_b(stages, microbatches - 1)


def moving(stages: int, microbatches: int) -> Schedule:
    return (interleaved if microbatches % 2 else zbv)(stages, microbatches)


# -- the numbers of one process --------------------------------------------------------------------------------------


class FrozenFirst(Deep):
    """The first stage has a trained parameter, but its output depends on none: no gradient comes back to it."""

    def build(self) -> None:
        super().build()
        self.net[:6].requires_grad_(False)
        self.net[1].unused = nn.Parameter(torch.zeros(1))

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        with torch.no_grad():
            hidden = self.net[:2](images)
        return F.cross_entropy(self.net[2:](hidden), labels)


class Sum(nn.Module):
    """A weight that is the sum of two parameters, read through views: autograd takes one memory for the gradients of
    both, whatever the number of samples, where the matmul's backward runs in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(16 * 16) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.one.view(16, 16) + self.other.view(16, 16)).tanh()


class Sums(MODELS["Shifts"]):  # type: ignore[misc]
    def build(self) -> None:
        super().build()
        self.shifts = nn.Sequential(*(Sum() for _ in range(4)))


class Keeps(nn.Linear):
    """Returns more columns in each batch, and a number that falls and that it keeps in a dictionary. Keeps a term of
    the loss, as a router does."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.width, self.rates = 3, {"alpha": 1.0}

    def forward(self, x: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        scores = super().forward(x)
        self.term = scores.logsumexp(-1).square().mean()
        return (x * scores.sigmoid())[:, : self.width], self.rates["alpha"]


class Annealed(OfRows):
    """Its first layer returns another width and another number in each batch. The last stage uses both, and has neither
    the layer nor its output. Where a stage recomputes layers, those of its other chunks answer without being
    recomputed."""

    def build(self) -> None:
        super().build()
        self.first = Keeps()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first.width, self.first.rates["alpha"] = 3 + batch_idx, 0.5**batch_idx

    def loss(self, batch: Any) -> Tensor:
        hidden, alpha = self.first(batch)
        columns = hidden.shape[1]
        loss = alpha * self.net(F.pad(hidden, (0, 6 - columns))).square().sum() / (len(batch) * columns)
        return loss + self.first.term


FOUR, RECOMPUTED = {"microbatches": 4}, {"activation_checkpointing": True}
ALL_AT_ONCE = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
REPLICAS = {"stages": 2, "data_parallel": 2}
FULLY = {**REPLICAS, "data_parallel_kind": "fully_shard"}
OF_ONE_SAMPLE = {**FULLY, "microbatches": BATCH // 2}
TENSOR = {"stages": 2, "tensor_parallel": 2, "sequence_parallel": True}


@pytest.mark.parametrize(("model", "ranks", "schedule", "options", "given"), [
    ("SharedPart", 3, "1f1b", FOUR | RECOMPUTED, {"validates_after": True}),
    (Sums, 3, "vhalf", FOUR, {}),
    ("Shifts", 2, Own(weights_last), {"microbatches": BATCH}, {}),
    ("Shifts", 4, "zbv", OF_ONE_SAMPLE, {"accumulate_grad_batches": 2}),
    (Skips, 3, partial(any_order, seed=1), {"microbatches": 5}, {}),
    # Chunks to which no gradient comes back hold nobody up within a batch.
    (FrozenFirst, 2, breadth_first, {"microbatches": BATCH}, {}),
    (Annealed, 2, "1f1b", FOUR, {}),
    (Annealed, 2, "interleaved", FOUR | RECOMPUTED, {}),
    # The contract has other axes under 1F1B only, and recomputes nothing.
    ("ShardableLlama", 4, "zbv", TENSOR | RECOMPUTED, ALL_AT_ONCE),
    ("Blocks", 4, "zbv", REPLICAS, ALL_AT_ONCE),
    *thorough(
        *((model, 2, schedule, FOUR, {}) for model in MODELS for schedule in ("gpipe", "interleaved", "zbv")),
        ("Llama", 4, "interleaved", FULLY | RECOMPUTED, ALL_AT_ONCE),
        ("GPT2", 4, "zbv", FULLY, {}),
        *((each, 2 + k % 2, partial(any_order, seed=k), FOUR, {}) for each in (Deep, Skips) for k in range(3, 20)),
    ),
])  # fmt: skip
def test_models_train_as_in_one_process(
    launch: Any, single: Any, model: Any, ranks: int, schedule: Any, options: dict[str, Any], given: Any
) -> None:
    options, replicas = {"microbatches": 2, **options, "schedule": schedule}, options.get("data_parallel", 1)
    reports = launch(train, ranks, model, "sync", options, batch_size=BATCH // replicas, **given)
    assert_equal(reports, single(model, **given), replicas=replicas)


def held_in_a_fit(limit: float | str, *, evaluates: bool = False) -> int:
    """The bytes of activations that this rank expects to hold. ``evaluates``: before it trains."""
    options = {"schedule": "zbv", "microbatches": BATCH, "activation_memory": limit}
    trainer = make_trainer("sync", [], options, max_epochs=1, limit_train_batches=1)
    module, loader = MODELS["Shifts"](), MODELS["Shifts"].loader()
    if evaluates:
        trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    assert isinstance(trainer.strategy, PipelineStrategy)
    return trainer.strategy.activation_bytes()


def test_a_limit_of_activations_in_bytes_is_kept_to(launch: Any, refused: Any) -> None:
    most = max(launch(held_in_a_fit, 3, 1.0))
    assert most / 2 < max(launch(held_in_a_fit, 3, f"{0.8 * most / 2**10:.3f}KiB")) <= 0.8 * most
    refused(["activation_memory='0.001KiB'", "V-Min"], held_in_a_fit, 3, "0.001KiB")
    words = ["activation_memory='1GiB': this module was cut for an evaluation"]
    refused(words, held_in_a_fit, 3, "1GiB", evaluates=True)


@pytest.mark.parametrize(("options", "said"), [
    ({"schedule": forgetful}, "schedule=forgetful, 2 stages, 4 microbatches: chunk 0: the forwards are of"),
    ({"schedule": moving}, "on other stages, [(0, 1, 0, 1), (1, 0, 0, 1)]. Place them by the number of stages alone."),
    ({"schedule": "interleaved", "chunks": 40}, "stages=2 with 40 chunks each, but the model has only"),
])  # fmt: skip
def test_lists_that_cannot_run_are_refused_before_training(refused: Any, options: Any, said: str) -> None:
    refused([said], train, 2, "LeNet", "sync", FOUR | options)
