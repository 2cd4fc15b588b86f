"""Packages that only some configs need: an extra of this package brings them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from recipes import IN_CHECKOUT
from recipes.examples import example_of
from recipes.launchers.ray import RayLauncher
from recipes.problem import Problem
from recipes.schema import kind_of

Config = Mapping[str, Any]

# By group and example: the extra, and the modules with the names of their packages.
_EXAMPLES: Mapping[tuple[str, str], tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        ("model", "hf"): ("hf", {"transformers": "transformers", "safetensors": "safetensors"}),
        ("model", "timm"): ("images", {"timm": "timm", "torchvision": "torchvision"}),
        ("data", "hf"): ("hf", {"datasets": "datasets"}),
        ("data", "images"): ("images", {"PIL": "pillow"}),
    }
)
# By the logger.
_TRACKERS: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "recipes.trackers.ContinuedWandbLogger": ("wandb", {"wandb": "wandb"}),
        "recipes.trackers.ContinuedMLFlowLogger": ("mlflow", {"mlflow": "mlflow-skinny"}),
    }
)


def _missing(path: str, value: Any, extra: str, packages: Mapping[str, str]) -> Iterator[Problem]:
    missing = [package for module, package in packages.items() if find_spec(module) is None]
    if missing:
        source = "." if IN_CHECKOUT else "lightning-parallel"
        fix = f'pip install "{source}[recipes,{extra}]"'
        yield Problem(path, value, f"{' and '.join(missing)} not installed", fix)


def _of_examples(config: Config) -> Iterator[Problem]:
    for (group, name), needed in _EXAMPLES.items():
        if example_of(config[group]) == name:
            yield from _missing(f"{group}.name", name, *needed)


def _of_adapters(config: Config) -> Iterator[Problem]:
    if example_of(config["model"]) == "hf" and config["model"]["lora"] is not None:
        yield from _missing("model.name", "hf", "hf", {"peft": "peft"})


def _of_cluster(config: Config) -> Iterator[Problem]:
    if kind_of("cluster", config["cluster"]) is RayLauncher and config["launch"]:
        yield from _missing("cluster", "ray", "ray", {"ray": "ray"})


def _of_loggers(config: Config) -> Iterator[Problem]:
    for key, node in config["logger"].items():
        target = node["_target_"] if node is not None else ""
        if target in _TRACKERS:
            yield from _missing(f"logger.{key}._target_", target, *_TRACKERS[target])


# Each by itself: where a value that one looks at is broken, the others are still told.
RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (_of_examples, _of_adapters, _of_cluster, _of_loggers)
