"""conf/: every option of every group composes, is valid, and is told to the user."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import get_class

from lightning_parallel.settings import settings_of
from recipes import CONF, build, schema
from recipes.compose import resolved
from recipes.examples import DATA, MODELS
from recipes.models.muon import MuonAdamW
from recipes.problem import Problem
from recipes.validate import validate
from tests.recipes.tiny import images, texts

GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir() and folder.name != "hydra"
}
# timm is in an environment of its own, where only the tests marked for it run.
NOWHERE = Path("/dev/null/run")  # of configs that tests only read: what writes there by mistake fails
NOT_THERE = 'timm and torchvision not installed; pip install ".[recipes,images]"'
WITHOUT_TIMM = [] if importlib.util.find_spec("timm") else [NOT_THERE]


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """The folder of a model of transformers, as far as a config is checked."""
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    return tmp_path


def composed(*overrides: str, folder: Path = NOWHERE) -> dict[str, Any]:
    """The config of a run in ``folder``, whose data are beside that."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolved(compose("train", overrides=[f"paths.data_dir={folder.parent}/data", *overrides]), str(folder))


def problems(*overrides: str) -> list[Problem | str]:
    return validate(composed(*overrides))


def assert_valid(found: list[Problem | str], *, timm: bool = False) -> None:
    assert [str(problem) for problem in found] == [f"model.name=timm: {said}" for said in WITHOUT_TIMM if timm]


# Models meet strategies below; test_experiments.py trains the others.
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


def test_a_folder_with_quantized_weights_is_refused(hf_folder: Path) -> None:
    given = ["model=hf", f"model.path={hf_folder}", "data=stdlib"]
    assert problems(*given) == []
    (hf_folder / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    (problem,) = problems(*given)
    assert str(problem).startswith(f"model.path={hf_folder}: its weights are quantized")


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
