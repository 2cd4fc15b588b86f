"""The zoo's runner calls a difference a difference, a refusal a refusal, and a hang a hang. What a run of it leaves,
and a sample of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.thorough import thorough
from tools.workers.pool import WorkerPool
from tools.zoo import layouts, registry
from tools.zoo.layouts import LAYOUTS, TIMEOUT
from tools.zoo.outcome import Outcome, Verdict, judge
from tools.zoo.record import Results, complaints, recorded
from tools.zoo.registry import entries
from tools.zoo.runner import Runner
from tools.zoo.training import Error, Report, load

FAULTY, ORDER = "tests.tools.zoo.faulty", "tools.zoo.handwritten.order"


@pytest.mark.parametrize(("entry", "layout"), [
    ("perturbed", "1F1B 2"), ("perturbed weights", "fully sharded 2"),
    *thorough(("perturbed", "fully sharded 2"), ("perturbed weights", "1F1B 2")),
])  # fmt: skip
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


def test_a_refusal_is_the_same_on_all_ranks_and_before_any_update() -> None:
    refused = Report(error=error())
    assert judged(refused, refused) is Outcome.REFUSED
    assert judged(refused, good()) is Outcome.CRASHED
    assert judged(refused, Report(error=error(kind="RuntimeError"))) is Outcome.CRASHED
    assert judged(refused, Report(error=error(ours=False))) is Outcome.CRASHED
    assert judged(refused, Report(error=error(), updates=1)) is Outcome.CRASHED
    assert judged(refused, Report(error=error("The link to stage 0 broke"))) is Outcome.CRASHED


def test_a_rank_that_waited_until_the_timeout_has_hung() -> None:
    waited = Report(error=error("stage 0 did not answer within the timeout", seconds=TIMEOUT + 1))
    assert judged(waited, waited) is judged(waited, good()) is Outcome.HANG
    assert judged(waited, Report(error=error())) is Outcome.CRASHED  # a process that ends is noticed


def test_every_weight_and_loss_counts() -> None:
    assert judged(good(), good()) is Outcome.EQUAL
    assert judged(good(), good(w=torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-9], dtype=torch.float64))) is Outcome.DIFFERENT
    assert judged(good(), replace(good(), losses=[1.0, 2.0 + 1e-9])) is Outcome.DIFFERENT
    assert judged(good(), good(w=WEIGHTS["w"] * torch.nan)) is Outcome.DIFFERENT
    assert judged(good(), good(other=torch.ones(1))) is Outcome.DIFFERENT
    assert judged(Report([1.0, 2.0], {"w": WEIGHTS["w"]}), Report([1.0, 2.0])) is Outcome.DIFFERENT  # no rank has b
    assert judged(good(), replace(good(), losses=[1.0, 2.1])) is Outcome.DIFFERENT
    assert judged(good(), replace(good(), losses=[1.0])) is Outcome.DIFFERENT


def test_shares_of_a_batch_have_the_mean_of_their_losses() -> None:
    low, high = replace(good(), losses=[0.5, 1.0]), replace(good(), losses=[1.5, 3.0])
    assert judged(low, high, layout="fully sharded 2") is Outcome.EQUAL
    assert judged(low, high) is Outcome.DIFFERENT


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
