"""Rules about images and what classifies them (``model_rules.py``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from recipes.data.image_folder import other_classes
from recipes.data.image_folder import problem as unreadable
from recipes.examples import example_of
from recipes.problem import Problem

Config = Mapping[str, Any]

_SET_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "model_name": "model.architecture",
        "num_classes": "model.classes",
        "pretrained": "model.pretrained",
        "checkpoint_path": "model.pretrained",
        "pretrained_cfg": "model.pretrained",
        "pretrained_cfg_overlay": "model.pretrained",
    }
)


def _timm(config: Config) -> Iterator[Problem]:
    model = config["model"]
    if example_of(model) != "timm":
        return
    architecture, pretrained = model["architecture"], model["pretrained"]
    if architecture is not None and ":" in architecture:
        fix = "give a name without a colon, and model.pretrained for a file or a folder"
        yield Problem("model.architecture", architecture, "names a place", fix)
    yield from _weights(architecture, pretrained)
    for key, instead in _SET_ELSEWHERE.items():
        if key in (model["arguments"] or {}):
            yield Problem(f"model.arguments.{key}", model["arguments"][key], "set by the recipe", f"use {instead}")
    if model["classes"] is None and example_of(config["data"]) != "images":  # those tell what is wrong themselves
        yield Problem("model.classes", None, "not known from the data", "give their number")


def _weights(architecture: str | None, pretrained: str | None) -> Iterator[Problem]:
    fix = "give a .safetensors file, or a folder as timm's save_for_hf writes it"
    if pretrained is None:
        if architecture is None:
            fix = "give a name of timm's, or model.pretrained=FOLDER"
            yield Problem("model.architecture", None, "names no model", fix)
    elif not Path(pretrained).exists():
        yield Problem("model.pretrained", pretrained, "no such file or folder", fix)
    elif Path(pretrained).is_dir():
        if not Path(pretrained, "config.json").exists():
            yield Problem("model.pretrained", pretrained, "has no config.json", fix)
        elif not _names_architecture(Path(pretrained, "config.json")):
            yield Problem("model.pretrained", pretrained, "its config.json names no architecture", fix)
        elif not Path(pretrained, "model.safetensors").exists():  # of other names timm prefers pickles
            yield Problem("model.pretrained", pretrained, "has no model.safetensors", fix)
    elif not pretrained.endswith(".safetensors"):
        yield Problem("model.pretrained", pretrained, "no file of safetensors", fix)
    elif architecture is None:
        message = f"{pretrained} doesn't say which model its weights are of"
        yield Problem("model.architecture", None, message, "give timm's name for it")


def _names_architecture(file: Path) -> bool:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get("architecture"), str)


def _images(config: Config) -> Iterator[Problem]:
    data = config["data"]
    if example_of(data) != "images":
        return
    found = unreadable(data["path"])
    if found is None and data.get("classes") is not None:
        found = other_classes(Path(data["path"]), data["classes"])
    if found is not None:
        yield Problem("data.path", data["path"], *found)
    for key in ("mean", "std"):
        if len(data[key]) != 3 or (key == "std" and min(data[key]) == 0):
            message = "not a number above 0 for each of red, green and blue" if key == "std" else "not three numbers"
            yield Problem(f"data.{key}", data[key], message, "give red, green and blue, in 0..1")


def _fits(config: Config) -> Iterator[Problem]:
    """The model takes images like these, and tells as many classes apart."""
    model, data = config["model"], config["data"]
    if example_of(data) != "images" or example_of(model) not in ("timm", "lenet", "mlp"):
        return
    size = data["size"]
    wanted = {"timm": {}, "lenet": {"channels": 3, "size": size}, "mlp": {"features": 3 * size * size}}
    for key, value in wanted[example_of(model)].items():
        if model[key] != value:
            message = f"data=images data.size={size} gives images of 3 x {size} x {size}"
            yield Problem(f"model.{key}", model[key], message, f"use model.{key}={value}")
    takes = (model.get("arguments") or {}).get("img_size", size)
    if takes != size:
        yield Problem("data.size", size, f"model.arguments.img_size={takes}", f"leave data.size out, or use {takes}")
    if data.get("classes") is not None and model["classes"] is not None:
        classes = len(data["classes"])
        if model["classes"] != classes:
            message = f"{data['path']} has {classes} classes"
            yield Problem("model.classes", model["classes"], message, f"use model.classes={classes}")


RULES = (_timm, _images, _fits)
