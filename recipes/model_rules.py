"""Rules about the model and the data of a config (``rules.py``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from recipes.data import documents, image_folder, text
from recipes.data.tokenizer import ByteTokenizer, has_tokenizer
from recipes.examples import DATA, MODELS, example_of, given
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


def _model_takes_data(config: Config) -> Iterator[Problem]:
    model, data = config["model"], config["data"]
    takes, gives = MODELS[example_of(model)].data if example_of(model) in MODELS else None, given(data)
    if takes is not None and gives is not None and gives not in takes:
        fitting = " or ".join(f"data={name}" for name, each in DATA.items() if each.data[0] in takes)
        message = f"takes {' or '.join(takes)}, but data={data['name']} gives {gives}"
        yield Problem("model.name", model["name"], message, f"use {fitting}")


def _model(config: Config) -> Iterator[Problem]:
    model = config["model"]
    if example_of(model) == "gpt" and model["width"] % model["heads"]:
        fix = "choose one that does"
        yield Problem("model.heads", model["heads"], f"does not divide model.width={model['width']}", fix)
    if example_of(model) == "lenet" and model["size"] % 4:
        yield Problem("model.size", model["size"], "two poolings can't halve it", "use a multiple of 4")
    if example_of(model) == "hf":
        yield from _folder(model, config["data"])


def _folder(model: Config, data: Config) -> Iterator[Problem]:
    """Of a model of transformers."""
    path = model["path"]
    if path is None or not Path(path).is_dir():
        message = "names no folder" if path is None else "no such folder"
        yield Problem("model.path", path, message, "give one, as `hf download ID --local-dir DIR` makes it")
    elif not (Path(path) / "config.json").exists():
        yield Problem("model.path", path, "has no config.json", "give a folder that save_pretrained has written")
    else:
        yield from _fits_text(model["path"], data)


def _fits_text(path: str, data: Config) -> Iterator[Problem]:
    """A model of transformers and the data, as far as its file tells. Whether it can be read, transformers says."""
    try:
        known = json.loads((Path(path) / "config.json").read_text())
    except ValueError:
        return
    if not isinstance(known, dict):
        return
    if known.get("quantization_config"):
        fix = "give the folder of the model that isn't; model.lora trains adapters in it"
        yield Problem("model.path", path, "its weights are quantized, and would be trained in float32", fix)
    if given(data) is None:
        return
    size, longest = known.get("vocab_size"), known.get("max_position_embeddings", known.get("n_positions"))
    if given(data) == "bytes" and isinstance(size, int) and size < ByteTokenizer.size:
        message = f"its vocabulary of {size} tokens is smaller than the {ByteTokenizer.size} bytes of the example data"
        yield Problem("model.path", path, message, "use another model, or data=hf")
    if "context" in data and isinstance(longest, int) and longest < data["context"]:
        message = f"more than the {longest} tokens that {path} takes"
        yield Problem("data.context", data["context"], message, f"use at most {longest}")


def _context(config: Config) -> Iterator[Problem]:
    model, data = config["model"], config["data"]
    windows = given(data) == "bytes"
    if example_of(model) == "gpt" and windows and model["context"] < data["context"]:
        message = f"shorter than the windows of data.context={data['context']}"
        yield Problem("model.context", model["context"], message, "make them equal")


def _text(config: Config) -> Iterator[Problem]:
    data = config["data"]
    if example_of(data) == "text":
        found = text.problem(data["path"], data["context"])
        if found is not None:
            yield Problem("data.path", data["path"], *found)


def _documents(config: Config) -> Iterator[Problem]:
    data = config["data"]
    if example_of(data) != "hf":
        return
    validation = [("val_path", data["val_path"])] if data["val_path"] is not None else []
    for key, path in [("path", data["path"]), *validation]:
        found = documents.problem(path)
        if found is not None:
            yield Problem(f"data.{key}", path, *found)
    folder = data["tokenizer"]
    if folder is not None and not has_tokenizer(Path(folder)):
        message = "no tokenizer is there" if Path(folder).is_dir() else "no such folder"
        fix = "give a folder with the model's tokenizer, or null to train on bytes"
        yield Problem("data.tokenizer", folder, message, fix)


# -- images -----------------------------------------------------------------------------------------------------------


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
        if not Path(pretrained, "model.safetensors").exists():  # of other names timm prefers pickles
            yield Problem("model.pretrained", pretrained, "has no model.safetensors", fix)
    elif not pretrained.endswith(".safetensors"):
        yield Problem("model.pretrained", pretrained, "no file of safetensors", fix)
    elif architecture is None:
        message = f"{pretrained} doesn't say which model its weights are of"
        yield Problem("model.architecture", None, message, "give timm's name for it")


def _images(config: Config) -> Iterator[Problem]:
    data = config["data"]
    if example_of(data) != "images":
        return
    found = image_folder.problem(data["path"])
    if found is None and data.get("classes") is not None:
        found = image_folder.other_classes(Path(data["path"]), data["classes"])
    if found is not None:
        yield Problem("data.path", data["path"], *found)
    for key in ("mean", "std"):
        if len(data[key]) != 3 or (key == "std" and min(data[key]) == 0):
            message = "not a number above 0 for each of red, green and blue" if key == "std" else "not three numbers"
            yield Problem(f"data.{key}", data[key], message, "give red, green and blue, in 0..1")


def _fits_images(config: Config) -> Iterator[Problem]:
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


RULES = (_model_takes_data, _model, _context, _text, _documents, _timm, _images, _fits_images)
