"""Packages that only some configs need: an extra of this package brings them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def _needed(config: Config) -> Iterator[tuple[str, Any, str, Mapping[str, str]]]:
    """The values that need packages: path, value, the extra, and the modules with the names of their packages."""
    model, data = config["model"], config["data"]
    if example_of(model) == "hf":
        lora = {"peft": "peft"} if model["lora"] is not None else {}
        yield "model.name", "hf", "hf", {"transformers": "transformers", "safetensors": "safetensors", **lora}
    if example_of(model) == "timm":
        yield "model.name", "timm", "images", {"timm": "timm", "torchvision": "torchvision"}
    if example_of(data) == "hf":
        yield "data.name", "hf", "hf", {"datasets": "datasets"}
    if example_of(data) == "images":
        yield "data.name", "images", "images", {"PIL": "pillow"}
    if kind_of("cluster", config["cluster"]) is RayLauncher and config["launch"]:
        yield "cluster", "ray", "ray", {"ray": "ray"}
    for key, node in config["logger"].items():
        target = node["_target_"] if node is not None else ""
        if target in _TRACKERS:
            yield f"logger.{key}._target_", target, *_TRACKERS[target]


def _installed(config: Config) -> Iterator[Problem]:
    for path, value, extra, packages in _needed(config):
        missing = [package for module, package in packages.items() if find_spec(module) is None]
        if missing:
            yield Problem(path, value, f"{' and '.join(missing)} not installed", pip_install(extra))


RULES = (_installed,)
