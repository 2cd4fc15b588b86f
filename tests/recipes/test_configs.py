"""conf/: every option of every group composes, is valid, and is told to the user; experiments and ways to debug run."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from hydra.utils import get_class

from lightning_parallel.settings import settings_of
from recipes import CONF, build, record, schema
from recipes.examples import DATA, MODELS
from recipes.models.muon import MuonAdamW
from recipes.problem import Problem
from recipes.validate import validate
from tests.recipes.runs import composed, problems, trained
from tests.recipes.tiny import images, model, texts
from tests.thorough import thorough
from tools.workers.pool import WorkerPool

GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name != "hydra"
}
# timm is in an environment of its own, where only the tests marked for it run.
NOT_THERE = 'timm and torchvision not installed; pip install ".[recipes,images]"'
WITHOUT_TIMM = [] if importlib.util.find_spec("timm") else [NOT_THERE]


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """The folder of a model of transformers, as far as a config is checked."""
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    return tmp_path


def assert_valid(found: list[Problem | str], *, timm: bool = False) -> None:
    assert [str(problem) for problem in found] == [f"model.name=timm: {said}" for said in WITHOUT_TIMM if timm]


# Strategies are validated, and experiments and ways to debug run, below; models in tests of their own.
ELSEWHERE = ("model", "strategy", "experiment", "debug")
OTHERS = {group: options for group, options in GROUPS.items() if group not in ELSEWHERE}


@pytest.mark.parametrize("number", range(max(map(len, OTHERS.values()))))
def test_every_option_composes_and_is_valid(number: int, hf_folder: Path) -> None:
    """One of each group at a time."""
    chosen = {group: options[number % len(options)] for group, options in OTHERS.items()}
    given = {
        "digits": ["model=mlp"],
        "text": [f"data.path={__file__}", "data.context=16"],
        "custom": ["data._target_=lightning.LightningDataModule"],
        "hf": ["model=hf", f"model.path={hf_folder}", f"data.path={hf_folder / 'texts.jsonl'}"],
        "images": ["model=lenet", "model.channels=3", "model.classes=4", "model.size=224"],
        "kubernetes": ["cluster.image=mine", "cluster.claim=runs"],
        "smoke": ["scheduler.warmup_steps=1"],  # of its few steps
    }
    words = [word for option in chosen.values() for word in given.get(option, [])]
    if chosen["data"] == "hf":
        texts(hf_folder / "texts.jsonl")
    elif chosen["data"] == "images":
        words.append(f"data.path={images(hf_folder / 'images')}")
    # No cluster here could be joined.
    assert problems(*(f"{group}={option}" for group, option in chosen.items()), *words, "launch=false") == []


def test_no_seed_is_a_new_one_for_each_run() -> None:
    first, second = (composed("seed=null") for _ in range(2))
    assert first["seed"] != second["seed"] and validate(first) == []


def test_help_names_every_option_of_every_group_and_its_default_first() -> None:
    config = (CONF / "train.yaml").read_text()
    groups = config.split("(the first option is the default)")[1].split("Examples")[0]
    words = set(groups.replace("(", " ").split())
    for group, options in GROUPS.items():
        assert {group, *options} <= words, group
    first = dict(re.findall(r"^ {10}(\w+) +(\w+)", groups, re.MULTILINE))
    defaults = {group: option for each in yaml.safe_load(config)["defaults"][1:] for group, option in each.items()}
    assert {group: first[group] for group, option in defaults.items() if option} == {
        group: option for group, option in defaults.items() if option
    }


CHOSEN = {
    "pipeline_naive": {"schedule": "naive", "microbatches": 1},
    "pipeline_gpipe": {"schedule": "gpipe"},
    "pipeline_interleaved": {"schedule": "interleaved"},
    "pipeline_zbv": {"schedule": "zbv"},
    "pipeline_vhalf": {"schedule": "vhalf"},
    "pipeline_vmin": {"schedule": "vmin"},
    "pipeline_tensor": {"tensor_parallel": 2},
    "pipeline_3d": {"tensor_parallel": 2, "data_parallel": 2},
}


@pytest.mark.parametrize("strategy", [each for each in GROUPS["strategy"] if each not in ("single", "ddp")])
def test_a_strategy_s_config_has_every_setting_of_the_strategy_with_its_default(strategy: str) -> None:
    config = composed(f"strategy={strategy}")
    assert validate(config) == []
    node = config["strategy"]
    assert isinstance(build.strategy({"strategy": node}), get_class(node["_target_"]))
    target = node.pop("_target_")
    options = schema.BY_TARGET["strategy"][target]
    defaults = {field.name: field.default for field, _ in settings_of(options)}
    assert node == defaults | CHOSEN.get(strategy, {})
    assert set(node) <= set(inspect.signature(get_class(target)).parameters)


def test_schemas_know_only_arguments_that_the_classes_take() -> None:
    def keys(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    assert keys(schema.Trainer) | set(schema.TRAINER_SET_ELSEWHERE) <= set(inspect.signature(L.Trainer).parameters)
    assert keys(schema.Adam) <= set(inspect.signature(torch.optim.AdamW).parameters)
    assert keys(schema.NAdam) <= set(inspect.signature(torch.optim.NAdam).parameters)
    assert keys(schema.Muon) <= set(inspect.signature(MuonAdamW).parameters)
    assert keys(schema.SGD) <= set(inspect.signature(torch.optim.SGD).parameters)
    for group, registry in (("model", MODELS), ("data", DATA)):
        for name, example in registry.items():
            bases = get_class(example.target).__mro__
            taken = {name for base in bases for name in inspect.signature(base.__init__).parameters}  # type: ignore[misc]
            assert keys(schema.BY_NAME[group][name]) <= taken, name


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
SELDOM = [name for name in GROUPS["experiment"] if name not in (*OFTEN, "vit_images")]


@pytest.mark.parametrize("experiment", [*OFTEN, pytest.param("vit_images", marks=pytest.mark.timm), *thorough(*SELDOM)])
def test_every_experiment_trains(pool: WorkerPool, tmp_path: Path, experiment: str) -> None:
    assert run(pool, tmp_path / "run", *given_to(experiment, tmp_path))["val_loss"] is not None


def test_every_experiment_and_every_way_to_debug_is_valid(tmp_path: Path) -> None:
    for experiment in SELDOM:
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
