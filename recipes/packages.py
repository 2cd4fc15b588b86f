"""Packages that only some configs need: an extra of this package brings them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from recipes import IN_CHECKOUT
from recipes.examples import example_of
from recipes.launchers.ray import RayLauncher
from recipes.problem import Problem
from recipes.schema import kind_of

Config = Mapping[str, Any]

# By the logger: the extra, and the modules with the names of their packages.
_TRACKERS: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "recipes.trackers.ContinuedWandbLogger": ("wandb", {"wandb": "wandb"}),
        "recipes.trackers.ContinuedMLFlowLogger": ("mlflow", {"mlflow": "mlflow-skinny"}),
    }
)


def pip_install(extra: str) -> str:
    """How the user installs what an extra names, in the checkout or anywhere else."""
    return f'pip install "{"." if IN_CHECKOUT else "lightning-parallel"}[recipes,{extra}]"'


# -- what needs packages ---------------------------------------------------------------------------------------------
# Path and value, the extra, and the modules with the names of their packages. Each group by itself: where another one
# has a broken value, this one is still told.

_Needed = Iterator[tuple[str, Any, str, Mapping[str, str]]]


def _by_model(config: Config) -> _Needed:
    model = config["model"]
    if example_of(model) == "hf":
        lora = {"peft": "peft"} if model["lora"] is not None else {}
        yield "model.name", "hf", "hf", {"transformers": "transformers", "safetensors": "safetensors", **lora}
    if example_of(model) == "timm":
        yield "model.name", "timm", "images", {"timm": "timm", "torchvision": "torchvision"}


def _by_data(config: Config) -> _Needed:
    data = config["data"]
    if example_of(data) == "hf":
        yield "data.name", "hf", "hf", {"datasets": "datasets"}
    if example_of(data) == "images":
        yield "data.name", "images", "images", {"PIL": "pillow"}


def _by_cluster(config: Config) -> _Needed:
    if kind_of("cluster", config["cluster"]) is RayLauncher and config["launch"]:
        yield "cluster", "ray", "ray", {"ray": "ray"}


def _by_loggers(config: Config) -> _Needed:
    for key, node in config["logger"].items():
        target = node["_target_"] if node is not None else ""
        if target in _TRACKERS:
            yield f"logger.{key}._target_", target, *_TRACKERS[target]


def _installed(needed: Callable[[Config], _Needed], config: Config) -> Iterator[Problem]:
    for path, value, extra, packages in needed(config):
        missing = [package for module, package in packages.items() if find_spec(module) is None]
        if missing:
            yield Problem(path, value, f"{' and '.join(missing)} not installed", pip_install(extra))


RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = tuple(
    partial(_installed, needed) for needed in (_by_model, _by_data, _by_cluster, _by_loggers)
)
