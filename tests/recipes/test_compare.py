"""recipes/compare: what is counted is what the formulas say, and the report says what the figures say."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from recipes import record, work
from recipes.compare import report, run
from recipes.compare.__main__ import compare
from recipes.compare.rows import Row, rows
from recipes.compare.run import Outcome, configs
from recipes.launchers.launcher import Failure, WorkersFailed
from recipes.launchers.local import LocalLauncher
from recipes.problem import ConfigError
from recipes.traffic import Traffic
from tests.recipes.runs import done
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

TINY = ["model=mlp", "data=digits", "model.width=16", "data.batch_size=12", "trainer.max_steps=8"]
MIB = 2**20


# -- real runs -----------------------------------------------------------------------------------------------


Measured = Callable[..., tuple[Row, list[dict[str, Any]]]]


@pytest.fixture
def measured(pool: WorkerPool, tmp_path: Path) -> Measured:
    def measure_one(strategy: str, *overrides: str) -> tuple[Row, list[dict[str, Any]]]:
        (planned,) = configs([*TINY, f"paths.data_dir={tmp_path}/data", *overrides], [strategy], tmp_path)
        assert planned.error is None and planned.config is not None
        folder = done(pool, planned.config)
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("measured-*.json"))]
        (row,) = rows([replace(planned, ranks=ranks, metrics=record.read_metrics(folder))])
        return row, ranks

    return measure_one


@pytest.mark.parametrize("strategy", ["fully_sharded", "tensor_parallel", "data_parallel", *thorough("ddp")])
def test_what_collectives_send_is_what_theory_says(measured: Measured, strategy: str) -> None:
    row, _ = measured(strategy, "trainer.max_steps=7")  # 6 and 7 are counted; in 8 tensor ranks compare their losses
    parameters = 4 * (64 * 16 + 16 + 2 * (16 * 16 + 16) + 10 * 16 + 10)  # bytes of an MLP of three hidden layers
    kinds = {
        "ddp": {"all-reduce": parameters},
        "fully_sharded": {"all-gather": parameters, "reduce-scatter": parameters / 2},  # even first dimensions
        # Activations of 12 samples: the row layer's output and the column layers' inputs' gradients; what is gathered.
        "tensor_parallel": {"all-reduce": 2 * 12 * 16 * 4, "all-gather": 12 * 16 * 4 / 2},
        "data_parallel": {},
    }
    assert {kind: n for kind, n in row.sent.items() if kind != "scalars"} == kinds[strategy]
    if strategy == "ddp":
        assert row.held["parameters"] == row.held["gradients"] == parameters <= row.held["optimizer"] / 2
    if strategy == "fully_sharded":
        assert all(row.held[name] < 0.6 * parameters for name in ("parameters", "gradients"))
    if strategy == "data_parallel":
        assert (row.processes, row.devices) == (1, 2)


@pytest.mark.parametrize("strategy", ["pipeline_async", *thorough("pipeline_1f1b")])
def test_what_a_pipeline_sends_is_activations_and_their_gradients(measured: Measured, strategy: str) -> None:
    row, ranks = measured(strategy)
    count = 4 if strategy == "pipeline_async" else 8  # microbatches
    more = row.sent["point-to-point"] * 2 - 2 * 12 * 16 * 4  # activations and their gradients
    # A trailer for each activation, a factor for each gradient; and the loss, for the other stage.
    assert 16 * count + 8 * count <= more <= 16 * count + 64 * count + 512
    assert row.theory == pytest.approx(0 if strategy == "pipeline_async" else 1 / 9)
    assert row.bubble is not None and 0 < row.bubble < 1
    assert {span["kind"] for rank in ranks for span in rank["spans"]} >= {"forward", "backward", "step"}


def test_every_update_between_warm_up_and_count_is_timed(measured: Measured) -> None:
    row, (rank,) = measured("single", "trainer.accumulate_grad_batches=2")
    assert len(rank["seconds"]) == 8 - 2 - 2  # of 8, two are a warm-up, and in two messages are counted
    assert row.samples == pytest.approx(24 / row.step) and row.tokens is None
    assert row.loss is not None and row.peaks[0] > 0


# -- one figure ----------------------------------------------------------------------------------------------


def measured_by_hand(seconds: list[float], peak: int, **more: Any) -> dict[str, Any]:
    thread = {"computing": 0.5, "queued": 0.2, "blocked": 0.3}
    held = {"parameters": 4 * MIB, "gradients": 4 * MIB, "optimizer": 8 * MIB}
    empty: dict[str, Any] = {"sent": {}, "received": 0}
    place = {"coordinates": {"data": 0, "tensor": 0, "pipeline": 0}}
    return place | empty | {"seconds": seconds, "peaks": [peak], "held": held, "thread": thread} | more


def outcomes(ddp_seconds: float = 0.1, nodes: int = 1) -> list[Outcome]:
    config = {
        "cluster": {"devices": 2, "threads": 1, "nodes": nodes},
        "data": {"name": "stdlib", "batch_size": 24, "context": 128},
        "model": {"name": "gpt", "width": 128},
        "trainer": {"max_steps": 30, "accumulate_grad_batches": 1, "precision": "32-true"},
        "optimized_metric": "val_loss",
    }
    ddp = {**config, "strategy": {"_target_": "lightning.pytorch.strategies.DDPStrategy"}}
    dp = {**config, "strategy": {"_target_": "lightning_parallel.DataParallelStrategy"}}
    one = {**config, "strategy": {"_target_": None}}
    sent = {"sent": {"all-reduce": 4.0 * MIB, "scalars": 4.0}}
    of_ddp = [measured_by_hand([ddp_seconds] * 4, peak * MIB, **sent) for peak in (40, 60)]
    return [
        Outcome("single", one, None, [measured_by_hand([0.16] * 4, 50 * MIB)], {"val_loss": 2.0}),
        Outcome("data_parallel", dp, None, [measured_by_hand([0.2] * 4, 60 * MIB)], {"val_loss": 2.0}),
        Outcome("ddp", ddp, None, of_ddp, {"val_loss": 2.001}),
        Outcome("pipeline_async", None, "rank 0: no luck today"),
    ]


def test_a_row_has_throughput_efficiency_and_imbalance() -> None:
    single, dp, ddp, failed = rows(outcomes())
    assert (single.efficiency, dp.efficiency, ddp.efficiency) == pytest.approx((1, 0.4, 0.8))
    assert (ddp.samples, ddp.tokens) == pytest.approx((240, 240 * 128))
    assert ddp.imbalance == pytest.approx(1.2) and ddp.peak == 60 * MIB
    assert failed.error == "rank 0: no luck today" and math.isnan(failed.step)
    _, _, two_machines, _ = rows(outcomes(nodes=2))
    assert (two_machines.devices, two_machines.efficiency) == (4, pytest.approx(0.4))


def test_a_prediction_is_that_of_the_same_layout() -> None:
    plan = [
        {"overrides": ["strategy=ddp", "cluster.devices=2"], "seconds": 0.09, "bytes": 7 * MIB},
        {"overrides": ["strategy=pipeline_1f1b", "strategy.microbatches=2"], "seconds": 1.0, "bytes": 1},
        {"overrides": ["strategy=pipeline_1f1b", "strategy.microbatches=4"], "seconds": 0.2, "bytes": 2},
    ]
    given = outcomes()
    ranks = [measured_by_hand([0.1] * 4, MIB, words=["strategy.microbatches=4"])]
    staged = replace(given[2], strategy="pipeline_1f1b", ranks=ranks)
    single, _, ddp, _, pipeline = rows([*given, staged], plan)
    assert (single.predicted, ddp.predicted, pipeline.predicted) == (None, (0.09, 7 * MIB), (0.2, 2))
    assert "| 100.0-100.0 | 90.0 |" in report.tables([ddp], "val_loss")[0].markdown()


def test_the_report_is_written_with_what_failed_and_says_what_the_figures_say(tmp_path: Path) -> None:
    planned = outcomes()
    table = rows(planned)
    told, slow = ("\n".join(report.findings(each)) for each in (table, rows(outcomes(0.4))))
    assert "is ddp: 1.60 x as fast as one process" in told and "is data_parallel: 0.80 x as fast as one" in slow
    assert "losses are within 1.0e-03 of one process's 2.0000 (ddp)" in told
    assert report.findings([]) == ["Too few strategies were measured to compare them."]
    config = planned[0].config
    assert config is not None
    head, found = report.headline(config, ["model=gpt"]), report.tables(table, "val_loss")
    shown = report.show(head, table, found)
    assert max(map(len, shown.splitlines())) < 147  # of which 13 are the longest name
    report.write(tmp_path, head, table, found)
    text = (tmp_path / "compare.md").read_text()
    assert "| ddp | 2 | 100.0 | 100.0-100.0 |  | 240 | 30,720 | 80% |" in text
    assert "4,096.0" in text and "| pipeline_async | rank 0: no luck today |" in text
    with (tmp_path / "compare.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert [line["strategy"] for line in lines] == ["single", "data_parallel", "ddp", "pipeline_async"]
    assert float(lines[2]["step_s"]) == 0.1 and float(lines[2]["sent_all-reduce_bytes"]) == 4 * MIB
    assert lines[3]["error"] == "rank 0: no luck today" and lines[3]["step_s"] == ""


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "message"), [
    (["strategies=[ddp,fully_shared]"], "strategies=fully_shared: no such strategy; did you mean fully_sharded"),
    (["strategy=ddp"], r"strategy=ddp: several are compared; use strategies=\[...\]"),
    (["hydra.run.dir=X"], "hydra.run.dir=X: Hydra runs nothing here; use output=X"),
    (["output=/tmp"], "output=/tmp: is there already"),
    (["strategies=[ddp]", "model.widht=3"], "model.widht=3: no such key in model; did you mean width"),
    (["strategies=[ddp]", "trainer.max_steps=5"], "trainer.max_steps=5: too few to be measured; use 6 or more"),
    (["strategies=[ddp]", "strategy.stagez=2"], "strategy.stagez=2: none of .*ddp has such a value"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_anything_starts(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(words)


def test_a_strategy_s_own_values_are_left_out_of_the_others(tmp_path: Path) -> None:
    ddp, pipeline = configs([*TINY, "strategy.microbatches=3"], ["ddp", "pipeline_1f1b"], tmp_path)
    assert ddp.error is None and pipeline.error is None and pipeline.config is not None
    assert pipeline.config["strategy"]["microbatches"] == 3 and pipeline.config["timeline"] is True


def test_the_layouts_are_planned_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: WorkerPool
) -> None:
    def launch(launcher: LocalLauncher, config_file: Path, processes: int) -> None:
        pool.run(work.main, processes, config_file.read_text(), init=False)

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    reference, _ = configs([*TINY, "plan.device=h100", f"paths.data_dir={tmp_path}/data"], ["single", "ddp"], tmp_path)
    found = run.plan(reference)
    assert {row["overrides"][0] for row in found} >= {"strategy=ddp", "strategy=pipeline_1f1b"}
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in found)
    assert run.plan(replace(reference, error="it can't be made")) == []


def test_a_failed_run_is_told_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(launcher: LocalLauncher, config_file: Path, processes: int) -> None:
        raise WorkersFailed(Failure(1, "ValueError: no luck today", None), processes)

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    (planned,) = configs(TINY, ["ddp"], tmp_path)
    assert run.run(planned).error == "rank 1: ValueError: no luck today"
    (refused,) = configs([*TINY, "strategy.microbatches=13"], ["pipeline_gpipe"], tmp_path)
    assert "more than the data.batch_size=12 samples" in (run.run(refused).error or "")


def counted() -> dict[str, Any]:
    pair = dist.new_group([0, 1])
    with Traffic() as traffic:
        dist.all_reduce(torch.ones(6))
        dist.broadcast(torch.ones(6), 0)
        dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(6))
        functional.all_reduce(torch.ones(6), "sum", dist.group.WORLD).wait()
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(6), group=pair)
        if dist.get_rank() == 0:
            dist.send(torch.ones(6), 2)
        if dist.get_rank() == 2:
            dist.recv(torch.empty(6), 0)
    return {"sent": dict(traffic.sent), "messages": dict(traffic.messages), "received": traffic.received}


def test_every_kind_of_message_is_counted_with_its_group(pool: WorkerPool) -> None:
    first, second, third = pool.run(counted, 3)
    of_all = {"broadcast": 16, "all-gather": 16, "reduce-scatter": 16, "scalars": 3}  # 24 bytes, or parts of them
    assert third["sent"] == of_all | {"all-reduce": 64}
    assert third["received"] == 24 and third["messages"]["point-to-point"] == 1
    assert first["sent"] == second["sent"] != third["sent"] and first["received"] == 0
    assert first["sent"]["all-reduce"] == third["sent"]["all-reduce"] + 24
