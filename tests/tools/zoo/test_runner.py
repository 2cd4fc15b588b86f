"""The zoo's runner calls a difference a difference, a refusal a refusal, and a hang a hang. What a run of it leaves,
and a sample of it."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tools.workers.pool import WorkerPool
from tools.zoo import layouts, registry
from tools.zoo.entry import Entry
from tools.zoo.handwritten.parts import Stack, rows
from tools.zoo.layouts import LAYOUTS, TIMEOUT
from tools.zoo.outcome import Outcome, Verdict, judge
from tools.zoo.record import Results, complaints, recorded
from tools.zoo.registry import entries
from tools.zoo.runner import Runner
from tools.zoo.training import Error, Report, load

FAULTY, ORDER = "tests.tools.zoo.test_runner", "tools.zoo.handwritten.order"


def ranks() -> int:
    """Of the run; inside a step torch.distributed says how many replicas there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Perturbed(Stack):
    """A loss that is off by a millionth on two ranks."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + 1e-6 * (ranks() - 1))


class PerturbedLog(Stack):
    """Losses that are right, and a weight that is off on the second rank."""

    def on_train_end(self) -> None:
        if ranks() > 1 and dist.get_rank() == 1:
            for parameter in self.parameters():
                parameter.data.add_(1e-6)


ENTRIES = (Entry("perturbed", "by hand", Perturbed, rows), Entry("perturbed weights", "by hand", PerturbedLog, rows))


@pytest.mark.parametrize(("entry", "layout"), [("perturbed", "1F1B 2"), ("perturbed weights", "fully sharded 2")])
def test_a_difference_of_a_millionth_is_one(pool: WorkerPool, entry: str, layout: str) -> None:
    verdict = Runner(pool).run(FAULTY, load(FAULTY, entry), layouts.find(layout))
    assert verdict is not None and verdict.outcome is Outcome.DIFFERENT
    assert verdict.deviation is not None and 1e-8 < verdict.deviation < 1e-4


# -- judging, without processes ----------------------------------------------------------------------------------

WEIGHTS = {"w": torch.ones(4, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
MESSAGE = "layers='x' isn't there"


def error(message: str = MESSAGE, *, kind: str = "ValueError", ours: bool = True, seconds: float = 1.0) -> Error:
    return Error(kind, message, ours, "trace", seconds)


def judged(*reports: Report, layout: str = "tensor 2") -> Outcome:
    plain = Report(losses=[1.0, 2.0], weights=dict(WEIGHTS), updates=2)
    return judge(load(ORDER, "sequential"), layouts.find(layout), list(reports), plain, lambda: [plain]).outcome


def good(**weights: torch.Tensor) -> Report:
    return Report([1.0, 2.0], WEIGHTS | weights)


REFUSED = Report(error=error())
WAITED = Report(error=error("stage 0 did not answer within the timeout", seconds=TIMEOUT + 1))
LOW, HIGH = replace(good(), losses=[0.5, 1.0]), replace(good(), losses=[1.5, 3.0])


@pytest.mark.parametrize(("one", "other", "outcome"), [
    # A refusal is the same on all ranks, and before any update.
    (REFUSED, REFUSED, Outcome.REFUSED),
    (REFUSED, good(), Outcome.CRASHED),
    (REFUSED, Report(error=error(kind="RuntimeError")), Outcome.CRASHED),
    (REFUSED, Report(error=error(ours=False)), Outcome.CRASHED),
    (REFUSED, Report(error=error(), updates=1), Outcome.CRASHED),
    (REFUSED, Report(error=error("The link to stage 0 broke")), Outcome.CRASHED),
    # A rank that waited until the timeout has hung.
    (WAITED, WAITED, Outcome.HANG),
    (WAITED, good(), Outcome.HANG),
    (WAITED, REFUSED, Outcome.CRASHED),  # a process that ends is noticed
    # Every weight and loss counts.
    (good(), good(), Outcome.EQUAL),
    (good(), good(w=torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-9], dtype=torch.float64)), Outcome.DIFFERENT),
    (good(), replace(good(), losses=[1.0, 2.0 + 1e-9]), Outcome.DIFFERENT),
    (good(), good(w=WEIGHTS["w"] * torch.nan), Outcome.DIFFERENT),
    (good(), good(other=torch.ones(1)), Outcome.DIFFERENT),
    (Report([1.0, 2.0], {"w": WEIGHTS["w"]}), Report([1.0, 2.0]), Outcome.DIFFERENT),  # no rank has b
    (good(), replace(good(), losses=[1.0]), Outcome.DIFFERENT),
    (LOW, HIGH, Outcome.DIFFERENT),
])  # fmt: skip
def test_ranks_are_judged_together(one: Report, other: Report, outcome: Outcome) -> None:
    assert judged(one, other) is outcome


def test_shares_of_a_batch_have_the_mean_of_their_losses() -> None:
    assert judged(LOW, HIGH, layout="fully sharded 2") is Outcome.EQUAL


FIRST, SECOND = LAYOUTS[0].name, LAYOUTS[1].name


def results(first: Outcome = Outcome.EQUAL, second: Outcome = Outcome.REFUSED) -> Results:
    made = Results()
    made.add("gpt2", FIRST, Verdict(first, deviation=1e-16), 1.0)
    made.add("gpt2", SECOND, Verdict(second, "layers='a|b' is wrong.\nMore.", math.inf), 2.0)
    made.add("bert", FIRST, None, 0.0)
    return made


@pytest.mark.parametrize(("before", "now", "is_worse"), [
    (Outcome.EQUAL, Outcome.REFUSED, True),
    (Outcome.EQUAL, Outcome.BY_NATURE, True),
    (Outcome.REFUSED, Outcome.DIFFERENT, True),
    (Outcome.REFUSED, Outcome.EQUAL, False),
    (Outcome.CRASHED, Outcome.HANG, False),
    (None, Outcome.REFUSED, False),
    (None, Outcome.DIFFERENT, True),
])  # fmt: skip
def test_worse_than_recorded_is_a_complaint(before: Outcome | None, now: Outcome, is_worse: bool) -> None:
    earlier = {} if before is None else {"gpt2": {FIRST: before}}
    assert bool(complaints(results(now), earlier)) == is_worse


def test_every_module_with_entries_is_in_the_registry() -> None:
    folder = Path(registry.__file__).parent
    listed = {file for file in folder.rglob("*.py") if "\nENTRIES" in file.read_text()}
    rooms = {folder.parent.parent / f"{room.replace('.', '/')}.py" for room in registry.ROOMS}
    assert rooms == listed


def test_the_zoo_has_models_enough_without_the_packages_of_its_own() -> None:
    assert len(registry.entries()) >= 80


SAMPLE = [
    ("gpt2", ["ZB-V 2", "tensor 2"]),
    ("llama, 2 key-value heads", ["sequence 2"]),
    ("bart", ["1F1B 2"]),
    ("mixtral", ["GPipe 2"]),
    ("two lists taking turns", ["1F1B 2"]),
    ("registered in another order", ["recomputed 2"]),
    ("metrics", ["1F1B 2"]),
]


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, chosen in SAMPLE for layout in chosen])
def test_no_worse_than_recorded(pool: WorkerPool, name: str, layout: str) -> None:
    ((room, entry),) = [(room, entry) for room, entry in entries() if entry.name == name]
    verdict = Runner(pool).run(room, entry, layouts.find(layout))
    assert verdict is not None
    expected = recorded().get(name, {}).get(layout, Outcome.REFUSED)
    assert not verdict.outcome.is_worse_than(expected), f"{verdict.outcome}, not {expected}: {verdict.detail}"
