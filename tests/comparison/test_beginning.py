"""The first unit that differs: what is compared where nothing differs, what isn't trusted, and a few of the faults of
docs/faults.md, at least one for each phase. The batches of ranks that run a layout."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.comparison import check, runs
from lightning_parallel.comparison.beginning import in_units, where
from lightning_parallel.comparison.evidence import Evidence, Witness
from lightning_parallel.comparison.runs import Shares
from lightning_parallel.comparison.units import INPUT, OF_INPUT, OF_OUTPUT, OUTPUT, Notes, Place, UnitWatch
from lightning_parallel.strategies.pipeline import PipelineStrategy
from tools.faults.faults import FAULTS
from tools.faults.models import LAYOUTS, MODELS
from tools.faults.training import PAIRS, case, case_of
from tools.workers.pool import WorkerPool

COMMON = {"accelerator": "cpu", "precision": "64-true"}


def noted(model: str, layout: str) -> tuple[list[Notes], Notes] | None:
    """On the first rank: what all ranks have noted of the second batch, and one process with the same microbatches."""
    kind, (devices, strategy, options) = MODELS[model], LAYOUTS[layout]
    watch, shares = UnitWatch(1), runs.Shares(kind.batches())
    made = check.layout_of(strategy, options, 4)
    trainer = runs.trainer_of(shares, Witness(), watch, strategy=made, devices=devices, **COMMON)
    replicas, microbatches = made.layout.size("data"), options.get("microbatches", 1)
    alone = UnitWatch(1, replicas)
    if made.layout.rank == 0:
        divided = PipelineStrategy(microbatches=microbatches) if microbatches > 1 else "auto"
        runs.train_in_one_process(kind(), None, COMMON, kind.batches(), divided, alone, replicas=replicas)
    runs.fit(trainer, kind(), None, shares)
    return (watch.of_all_ranks, *alone.of_all_ranks) if made.layout.rank == 0 else None


@pytest.mark.parametrize(("model", "layout"), [
    ("Words", "stages"), ("Pictures", "interleaved stages"), ("Untied", "late stages"), ("Blocks", "fully sharded"),
    ("Untied", "tensor"),
])  # fmt: skip
def test_all_units_are_compared_and_none_differs(pool: WorkerPool, model: str, layout: str) -> None:
    ranks, alone = pool.run(noted, LAYOUTS[layout][0], model, layout, init=False)[0]
    assert in_units(ranks, alone, 1, 1e-9) is None
    compared = {place[:2] for notes in ranks for part in notes.by_part() for place in part}
    # Lists of layers aren't called as a whole in stages.
    right = {place[:2] for part in alone.by_part() for place in part if place.unit != "blocks"}
    assert len(right) > 20 and right <= compared
    # Each number in it counts.
    for what in (INPUT, OUTPUT, OF_OUTPUT):
        place, (when, tensor) = next(item for item in ranks[-1].seen.items() if item[0].what == what)
        changed = {**ranks[-1].seen, place: (when, tensor + 1)}
        found = in_units([*ranks[:-1], replace(ranks[-1], seen=changed)], alone, 1, 1e-9)
        assert found is not None and found.unit == place.unit


# -- what isn't trusted ------------------------------------------------------------------------------------------


def notes(*seen: tuple[str, str, Tensor], **others: Any) -> Notes:
    return Notes({Place(what, unit, 0, 0): (float(k), x) for k, (what, unit, x) in enumerate(seen)}, **others)


X, Y = torch.randn(2, 4, 6, dtype=torch.float64)


PIECE: dict[str, Any] = {"piece": (0, 2)}
FUSED: dict[str, Any] = {**PIECE, "fused": frozenset({(2, 2, 2)})}
CHAIN = notes((OUTPUT, "up", X), (OUTPUT, "down", Y), (OUTPUT, "next", X))
QKV, PARTS = notes((OUTPUT, "qkv", X), (OUTPUT, "head", Y)), X[:, [0, 2, 4]]
BEFORE = [(OUTPUT, "first", X), (OUTPUT, "second", X), (OF_OUTPUT, "second", X)]
BACK = notes(*BEFORE, (OF_INPUT, "second", Y), (OF_OUTPUT, "first", Y))
HALF = (OF_INPUT, "second", Y / 2)


@pytest.mark.parametrize(("rank", "alone", "found"), [
    # A piece counts only before a whole output that differs.
    (notes((OUTPUT, "up", X[:, :3]), (OUTPUT, "down", Y), (OUTPUT, "next", X), **PIECE), CHAIN, None),
    (notes((OUTPUT, "up", Y[:, :3]), (OUTPUT, "down", Y), (OUTPUT, "next", X), **PIECE), CHAIN, None),
    (notes((OUTPUT, "up", Y[:, :3]), (OUTPUT, "down", X), (OUTPUT, "next", X), **PIECE), CHAIN, ("up", OUTPUT)),
    (notes((OUTPUT, "up", Y[:, :3]), (OUTPUT, "down", Y), (OUTPUT, "next", Y), **PIECE), CHAIN, ("next", OUTPUT)),
    # Fused parts are divided one by one.
    (notes((OUTPUT, "qkv", PARTS), (OUTPUT, "head", Y), **FUSED), QKV, None),
    (notes((OUTPUT, "qkv", PARTS), (OUTPUT, "head", X), **FUSED), QKV, ("head", OUTPUT)),
    # An input's gradient may be a part of it: other stages use the input, too.
    (notes(*BEFORE, HALF, (OF_OUTPUT, "first", Y)), BACK, None),
    (notes(*BEFORE, HALF, (OF_OUTPUT, "first", Y / 2)), BACK, ("second", OF_INPUT)),
    (notes(*BEFORE, (OF_INPUT, "second", Y), (OF_OUTPUT, "first", Y / 2)), BACK, ("first", OF_OUTPUT)),
    # A gradient that hasn't come differs from any but zeros.
    (notes((OUTPUT, "unit", X)), notes((OUTPUT, "unit", X), (OF_OUTPUT, "unit", X)), ("unit", OF_OUTPUT)),
    (notes((OUTPUT, "unit", X)), notes((OUTPUT, "unit", X), (OF_OUTPUT, "unit", X * 0)), None),
])  # fmt: skip
def test_what_is_a_part_counts_only_before_a_whole_that_differs(
    rank: Notes, alone: Notes, found: tuple[str, str] | None
) -> None:
    first = in_units([rank], alone, 0, 1e-9)
    assert (first and (first.unit, first.what.split(" on ")[0])) == found


def test_a_part_of_a_sum_counts_only_before_an_output_that_differs() -> None:
    """Ranks that share a head have parts of its gradient."""
    outputs = [(OUTPUT, "norm", X), (OUTPUT, "head", X)]

    def gradients(head: Tensor, norm: Tensor) -> Notes:
        return notes(*outputs, (OF_OUTPUT, "head", head), (OF_OUTPUT, "norm", norm))

    part = X.roll(1, 0)
    assert in_units([gradients(part, Y), gradients(X - part, Y)], gradients(X, Y), 0, 1e-9) is None
    found = in_units([gradients(part, X), gradients(X - part, Y)], gradients(X, Y), 0, 1e-9)
    assert found is not None and found.unit == "head"


def test_no_parameter_is_blamed_where_units_cannot_be_compared() -> None:
    """Such as where a batch is divided otherwise than one process divides it."""
    right, wrong = (Evidence(gradients=[{"unit.weight": x}], weights=[{"unit.weight": X}]) for x in (X, 2 * X))
    alone = notes((OUTPUT, "unit", X))
    found = where([wrong], right, [alone], alone, 0, 1e-9)
    assert found is not None and (found.unit, found.phase) == ("unit", "gradient")
    assert where([wrong], right, [notes((OUTPUT, "unit", X[:3]))], alone, 0, 1e-9) is None
    assert where([wrong], right, [notes((OUTPUT, "unit", X), parts=2)], alone, 0, 1e-9) is None


def test_a_replicas_share_of_a_batch_has_memory_of_its_own() -> None:
    """The copy of a view has the memory of all: each rank would be measured with the batch of all replicas."""
    strategy = SimpleNamespace(broadcast=lambda given: given)
    sampler = {"num_replicas": 2, "rank": 1}
    trainer: Any = SimpleNamespace(strategy=strategy, distributed_sampler_kwargs=sampler)
    whole: Any = torch.arange(8.0)
    whole.tag = "a"  # as subclasses do
    shares = Shares([whole, whole])
    shares.setup(trainer, nn.Identity(), "fit")  # type: ignore[arg-type]
    for share in shares:
        assert share.tolist() == [4, 5, 6, 7] and share.untyped_storage().nbytes() == 16
        assert share.tag == "a"


SAMPLE = [
    "activations are those of the microbatch before",
    "the factor of a batch isn't sent on",
    "gradients are clipped by the stage's norm",
    "a column layer doesn't sum the gradients of its input",
    "gradients aren't averaged over replicas",
]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.thorough) for n in FAULTS])
def test_a_fault_is_found_and_placed(pool: WorkerPool, name: str) -> None:
    found = case_of(pool, name)
    assert found.is_right, found.report


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_without_a_fault_there_is_no_alarm(pool: WorkerPool, model: str, layout: str) -> None:
    found = case(pool, model, layout)
    assert found.is_right, found.report
