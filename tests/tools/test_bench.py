"""The measurements run and give their tables; what they find is not tested here."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.tables import Table
from tests.thorough import thorough
from tools.bench import __main__ as bench
from tools.bench import (
    checkpoints,
    compute,
    contention,
    data,
    folder,
    halves,
    host_time,
    late,
    memory,
    messages,
    one_device,
    optimizers,
    overhead,
    plan,
    plan_models,
    processes,
    report,
    shared_device,
    sleeping,
    tensor,
    two_ranks,
    whole,
)
from tools.bench.by_hand import Bare
from tools.bench.contestants import Ours, Torch
from tools.bench.replicated import Work


def column(table: Table, name: str) -> list[object]:
    return [record[name] for record in table.records()]


SPEEDS: Any = {"rounds": 1, "steps": 1, "fits": 1, "batches": 5, "forward": 1e-3, "backward": 2e-3, "width": 4}
WHOLE: Any = {"layers": 2, "width": 64, "samples": 1, "length": 4, "batches": 3, "rounds": 1}
COMPUTE: Any = {"layers": 4, "width": 64, "length": 4, "samples": 1, "microbatches": 2, "rounds": 1, "pairs": 2}


def replicas(group: data.Group) -> list[Table]:
    microbatches = 4 if group is data.PIPELINE_GROUP else 1  # with two, torch's DDP fails in its 1F1B
    work = Work(layers=2, width=8, heads=2, length=4, samples=4, microbatches=microbatches)
    return data.measure(group, data.Sizes(work, rounds=2, steps=1, skip=0))


# Each measurement in a small form, with the number of rows of each of its tables.
MEASUREMENTS: dict[str, tuple[Callable[[], list[Table]], list[int]]] = {
    "sleeping": (lambda: sleeping.measure(sleeping.Sizes(((2, 3),), ((2, 4),), (2,), **SPEEDS)), [16, 5, 10, 2]),
    "compute": (lambda: compute.measure(compute.Sizes(**COMPUTE, stages=(2,))), [11, 6]),
    "halves": (lambda: halves.measure(halves.Sizes(width=64, length=8, depth=1, pairs=2)), [2]),
    "overhead": (
        lambda: overhead.measure(overhead.Sizes(step=5e-3, microbatches=2, width=4, rounds=1, batches=4, skip=1)), [3]
    ),
    "whole": (lambda: whole.measure(whole.Sizes(sleeping=2, forward=1e-3, backward=2e-3, **WHOLE)), [8]),
    "mlp": (lambda: tensor.measure_mlp(tensor.MLPSizes(((8, 2), (4, 3)), rounds=2, steps=(2, 1))), [8]),
    "block": (lambda: tensor.measure_block(tensor.BlockSizes(((8, 2, 2, 4),), layers=2, rounds=1, steps=(1,))), [7]),
    "alone": (lambda: [*tensor.measure_alone(tensor.AloneSizes(((4, 2),), rounds=2, steps=(3,)))][-1:], [3]),
    **{
        f"replicas {number}": (partial(replicas, group), [len(group.contestants)])
        for number, group in enumerate((data.DDP_GROUP, data.FSDP_GROUP, data.PIPELINE_GROUP, data.THREADS_GROUP))
    },
    "optimizers": (lambda: optimizers.measure(optimizers.QUICK), [4]),
    "folder": (
        lambda: folder.measure(folder.Sizes(layers=2, width=64, vocabulary=64, ranks=2, rounds=1)), [2]
    ),
    "checkpoints": (lambda: checkpoints.measure(checkpoints.Sizes(ranks=2, megabytes=1, tensors=4, rounds=1)), [6]),
    "one device": (lambda: [*one_device.measure(one_device.QUICK)][-1:], [2 * len(one_device.PRECISIONS)]),
    "shared device": (lambda: shared_device.measure(shared_device.QUICK), [3]),
    "two ranks": (lambda: [*two_ranks.measure(two_ranks.QUICK)][-1:], [3]),
    "contention": (lambda: [*contention.measure(contention.QUICK)][-1:], [2]),
    "host time": (lambda: [*host_time.measure(host_time.QUICK)][-1:], [3]),
    "late": (lambda: [*late.measure(late.QUICK)][-1:], [2]),
}  # fmt: skip


OFTEN = ["host time"]  # where rows may fail


@pytest.mark.parametrize("name", [*OFTEN, *thorough(*sorted(MEASUREMENTS.keys() - OFTEN))])
def test_it_measures_all_contestants(name: str) -> None:
    measure, rows = MEASUREMENTS[name]
    tables = [*measure()]
    assert [len(table.rows) for table in tables] == rows
    assert {row.get(report.HOW, "ended") for table in tables for row in table.records()} == {"ended"}
    numbers = [cell for table in tables for row in table.rows for cell in row if isinstance(cell, float)]
    assert numbers and all(map(math.isfinite, numbers))


def fails_or_hangs(how: str) -> str:
    if how == "fails" and dist.get_rank() == 1:
        raise ValueError("not\ntoday")
    if how != "ends":
        time.sleep(100)
    return os.environ["HOW"]


@pytest.mark.parametrize(("how", "limit", "said", "found"), [
    ("ends", 90.0, "ended", ["so"] * 2),
    ("fails", 90.0, "failed: ValueError: not today", None),
    ("hangs", 2.0, "hung: stopped after 2 s", None),
])  # fmt: skip
def test_what_may_fail_or_hang_is_ended_and_told(how: str, limit: float, said: str, found: list[str] | None) -> None:
    assert processes.attempt(fails_or_hangs, 2, how, limit=limit, environment={"HOW": "so"}) == (said, found)


def trained(schedule: str) -> list[list[Tensor]]:
    """The parameters of this rank's stage after two steps, by each contestant."""
    batch = torch.arange(24.0).reshape(4, 2, 3).sin()
    results = []
    for kind in (Ours, Torch, Bare):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(dist.get_world_size())))
        mine = layers[dist.get_rank() if kind is Torch else -1 - dist.get_rank()]  # else rank 0 has the last stage
        contestant = kind(layers, schedule, batch, 4, partial(torch.optim.SGD, lr=0.5))
        for _ in range(2):
            contestant.step()
        results.append([p.detach().clone() for p in mine.parameters()])
    return results


@pytest.mark.parametrize("schedule", ["1f1b", *thorough("gpipe")])
def test_contestants_of_a_schedule_train_alike(schedule: str) -> None:
    ranks = processes.run(trained, 3, schedule)
    for rank, (ours, _, by_hand) in enumerate(ranks):
        torch.testing.assert_close(by_hand, ours)
        torch.testing.assert_close(ranks[-1 - rank][1], ours)


def small_mlp() -> Any:
    return plan_models.Classifier(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), partial(torch.optim.SGD))


def small_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8), torch.randint(0, 8, (8,))


def test_plans_are_judged_by_their_layouts() -> None:
    model = plan_models.Model("small", "mlp", small_mlp, small_batch)
    found = plan.judged(model, 2, steps=1)
    assert [pair.how for pair in found.pairs] == ["ended"] * len(found.pairs) and len(found.pairs) > 5
    # Of a few kilobytes, what tensor ranks hold is mostly messages.
    whole = [pair for pair in found.pairs if pair.row.choice.tensor == 1]
    assert found.regret >= 1 and all(0.3 < pair.memory < 3 for pair in whole)
    families, choices, rows = plan.tables([found])
    assert [len(table.rows) for table in (families, choices, rows)] == [1, 1, len(found.pairs)]
    assert bench._on("cpu")["plan"].keys() == {*plan_models.FAMILIES, plan.FOUR}


def test_what_is_held_is_what_theory_says() -> None:
    (table,) = memory.measure(memory.Sizes(stages=2, microbatches=3))
    assert len(table.rows) == 7
    assert column(table, "activations") == column(table, "theory")
    assert column(table, "weight copies") == column(table, "theory, copies")


def test_what_tensor_parallelism_sends_is_what_theory_says() -> None:
    (table,) = messages.measure(messages.Sizes(layers=2, width=8, heads=2, samples=1, length=4))
    assert [(r["direction"], r["collective"], r["count"]) for r in table.records() if r["contestant"] == "ours"] == [
        ("forward", "all-reduce", 4),
        ("backward", "all-reduce", 4),
    ]
    assert "ours, sequence-parallel" in column(table, "contestant")
    assert column(table, "count") == column(table, "theory")
    assert column(table, "MiB") == column(table, "theory (MiB)")


def test_tables_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> list[Table]:
        return [Table("Sums", {"what": "", "value": ".2f"}, [["one and two", 3.0], ["nothing", None]], "By hand.")]

    monkeypatch.setattr(bench, "PIPELINE", {"sums": (measure, measure)})
    bench.main(["pipeline", "--only", "sums", "--quick", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "one and two   3.00" in printed
    assert "| one and two | 3.00 |\n| nothing |  |\n\nBy hand." in (tmp_path / "pipeline.md").read_text()
    written = json.loads((tmp_path / "pipeline.json").read_text())
    assert written["tables"][0]["rows"] == [{"what": "one and two", "value": 3.0}, {"what": "nothing", "value": None}]
    assert {"processor", "cores", "versions", "date", "load"} <= written.keys()
    assert report.headline(written) in printed


def test_a_device_that_is_not_used_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="--device=cuda: checkpoint is measured on CPUs"):
        bench.main(["checkpoint", "--device", "cuda"])
    with pytest.raises(SystemExit, match="--device=cuda: data is measured on CPUs"):
        bench.main(["data", "--device", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cuda: there is no GPU"):
        bench.main(["tensor", "--device", "cuda", "--only", "alone"])
