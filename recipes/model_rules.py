"""Rules about the model and the data of a config (``rules.py``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes import examples, image_rules
from recipes.data.files import problem as unreadable
from recipes.data.textfile import problem as unusable
from recipes.data.tokenizer import ByteTokenizer, has_tokenizer
from recipes.examples import example_of
from recipes.problem import Problem

Config = Mapping[str, Any]


def _model_takes_data(config: Config) -> Iterator[Problem]:
    model, data = config["model"], config["data"]
    takes, gives = examples.TAKES.get(example_of(model)), examples.GIVES.get(example_of(data))
    if takes is not None and gives is not None and gives not in takes:
        fitting = " or ".join(f"data={name}" for name, kind in examples.GIVES.items() if kind in takes)
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
        yield Problem("model.path", path, message, "give one that save_pretrained has written")
    elif not (Path(path) / "config.json").exists():
        yield Problem("model.path", path, "has no config.json", "give a folder that save_pretrained has written")
    else:
        yield from _fits(model["path"], data)


def _fits(path: str, data: Config) -> Iterator[Problem]:
    """A model of transformers and the data, as far as its file tells. Whether it can be read, transformers says."""
    try:
        known = json.loads((Path(path) / "config.json").read_text())
    except ValueError:
        return
    if not isinstance(known, dict) or example_of(data) not in examples.GIVES:
        return
    size, longest = known.get("vocab_size"), known.get("max_position_embeddings", known.get("n_positions"))
    if examples.GIVES[example_of(data)] == "bytes" and isinstance(size, int) and size < ByteTokenizer.size:
        message = f"its vocabulary of {size} tokens is smaller than the {ByteTokenizer.size} bytes of the example data"
        yield Problem("model.path", path, message, "use another model, or data=hf")
    if "context" in data and isinstance(longest, int) and longest < data["context"]:
        message = f"more than the {longest} tokens that {path} takes"
        yield Problem("data.context", data["context"], message, f"use at most {longest}")


def _context(config: Config) -> Iterator[Problem]:
    model, data = config["model"], config["data"]
    windows = examples.GIVES.get(example_of(data)) == "bytes"
    if example_of(model) == "gpt" and windows and model["context"] < data["context"]:
        message = f"shorter than the windows of data.context={data['context']}"
        yield Problem("model.context", model["context"], message, "make them equal")


def _text(config: Config) -> Iterator[Problem]:
    data = config["data"]
    if example_of(data) == "text":
        found = unusable(data["path"], data["context"])
        if found is not None:
            yield Problem("data.path", data["path"], *found)


def _documents(config: Config) -> Iterator[Problem]:
    data = config["data"]
    if example_of(data) != "hf":
        return
    validation = [("val_path", data["val_path"])] if data["val_path"] is not None else []
    for key, path in [("path", data["path"]), *validation]:
        found = unreadable(path)
        if found is not None:
            yield Problem(f"data.{key}", path, *found)
    folder = data["tokenizer"]
    if folder is not None and not has_tokenizer(Path(folder)):
        message = "no tokenizer is there" if Path(folder).is_dir() else "no such folder"
        fix = "give a folder with the model's tokenizer, or null to train on bytes"
        yield Problem("data.tokenizer", folder, message, fix)


RULES = (_model_takes_data, _model, _context, _text, _documents, *image_rules.RULES)
