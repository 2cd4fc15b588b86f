"""conf/experiment and conf/debug: each is a recipe that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes import record
from tests.recipes.runs import trained
from tests.recipes.test_configs import GROUPS, composed, problems
from tests.recipes.tiny import images, model, texts
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

FEW = ["trainer.max_steps=2", "trainer.limit_val_batches=1"]
GPT = ["model.layers=4", "model.width=16", "model.heads=2", "data.context=16", "data.batch_size=8"]
VIT = ["+model.arguments.embed_dim=32", "+model.arguments.num_heads=4", "+model.arguments.depth=4"]
WARM_UP = ["scheduler.warmup_steps=1"]


def run(pool: WorkerPool, folder: Path, *overrides: str) -> dict[str, float | None]:
    """The numbers of a run in a small form."""
    assert record.read(trained(pool, folder, *overrides))["status"] == "completed"
    return record.read_metrics(folder)


def given_to(experiment: str, tmp_path: Path) -> list[str]:
    """What makes it small, and what it needs."""
    given = [f"experiment={experiment}", *FEW]
    chosen = composed(given[0])
    if chosen["model"]["name"] == "hf":
        given += [f"model.path={model(tmp_path / 'model')}", f"data.path={texts(tmp_path / 'a.jsonl')}"]
        given.append("data.context=32")
    if chosen["data"]["name"] == "images":
        folder = images(tmp_path / "images")
        given += [f"data.path={folder}", "data.batch_size=4", "model.arguments.img_size=16", *VIT]
    given += GPT if chosen["model"]["name"] == "gpt" else []
    return given + (WARM_UP if chosen["scheduler"]["name"] == "cosine" else [])


OFTEN = ["async_quality"]  # adapters: models/test_hf.py
OTHERS = [name for name in GROUPS["experiment"] if name not in (*OFTEN, "vit_images")]


@pytest.mark.parametrize("experiment", [*OFTEN, pytest.param("vit_images", marks=pytest.mark.timm), *thorough(*OTHERS)])
def test_every_experiment_trains(pool: WorkerPool, tmp_path: Path, experiment: str) -> None:
    assert run(pool, tmp_path / "run", *given_to(experiment, tmp_path))["val_loss"] is not None


def test_every_experiment_and_every_way_to_debug_is_valid(tmp_path: Path) -> None:
    for experiment in OTHERS:
        assert problems(*given_to(experiment, tmp_path)) == []
    for debug in set(GROUPS["debug"]) - {"overfit"}:
        assert problems(f"debug={debug}", "strategy=pipeline_1f1b") == []


@pytest.mark.parametrize("debug", ["overfit", *thorough(*(each for each in GROUPS["debug"] if each != "overfit"))])
def test_every_way_to_debug_runs_in_a_pipeline(pool: WorkerPool, tmp_path: Path, debug: str) -> None:
    few = ["trainer.max_steps=3"] if debug in ("overfit", "profiler") else []
    metrics = run(pool, tmp_path / "run", f"debug={debug}", "strategy=pipeline_1f1b", "cluster.devices=2", *GPT, *few)
    assert metrics["train_loss"] is not None


@pytest.mark.parametrize(("profiler", "strategy"), [
    ("pytorch", "ddp"),
    *thorough(("simple", "pipeline_async"), ("advanced", "pipeline_1f1b"), ("pytorch", "pipeline_zbv")),
])  # fmt: skip
def test_a_profiler_leaves_a_file_of_each_rank(pool: WorkerPool, tmp_path: Path, profiler: str, strategy: str) -> None:
    given = [f"trainer.profiler={profiler}", f"strategy={strategy}", "cluster.devices=2", "trainer.max_steps=5"]
    run(pool, tmp_path / "run", *given, *GPT, "trainer.limit_val_batches=1")
    files = {file.name: file for file in (tmp_path / "run" / "profile").iterdir()}
    if profiler != "pytorch":
        assert sorted(files) == ["fit-rank0-0.txt", "fit-rank1-1.txt"]
        return
    assert sorted(files) == ["trace_rank0.json", "trace_rank1.json"]
    for file in files.values():
        names = [str(event.get("name")) for event in json.loads(file.read_text())["traceEvents"]]
        assert {name for name in names if name.startswith("ProfilerStep#")} == {f"ProfilerStep#{n}" for n in (2, 3, 4)}
        assert any("mm" in name for name in names)
