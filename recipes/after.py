"""What a worker does with a trained model: ``recipes.evaluate`` and ``recipes.generate``."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from recipes import build, record
from recipes.data.prompts import batches_of
from recipes.data.tokenizer import Bytes, Tokenizer, tokenizer_of
from recipes.generate import TEXTS
from recipes.models.generation import Generation
from recipes.models.language_model import LanguageModel
from recipes.schema import GIVES, example_of

Config = Mapping[str, Any]


def evaluate(config: Config) -> None:
    """Validate and test, as far as the module has steps for it. It leaves ``metrics.json`` in the folder.

    Raises:
        ValueError: the module has neither step.
    """
    datamodule, module = build.data(config), _model(config)
    trainer = build.trainer(config)
    metrics: dict[str, Any] = {}
    loops = {"validation_step": trainer.validate, "test_step": trainer.test}
    known = [loop for name, loop in loops.items() if is_overridden(name, module)]
    if not known:
        raise ValueError(f"A {type(module).__name__} has neither a validation_step nor a test_step.")
    for loop in known:
        loop(module, datamodule=datamodule, ckpt_path=config["ckpt_path"], verbose=False)
        metrics |= trainer.callback_metrics
    _end(config, trainer, metrics)


def generate(config: Config) -> None:
    """Go on from prompts. It leaves ``texts.jsonl`` and ``metrics.json`` in the folder.

    Raises:
        ValueError: the module is no language model of the recipes, or a prompt is too long for it.
    """
    module, settings = _model(config), config["generation"]
    if not isinstance(module, LanguageModel):
        raise ValueError(f"A {type(module).__name__} writes no text: model=gpt and model=hf do.")
    tokenizer = _tokenizer(config)
    texts = settings["prompts"]
    if settings["chat"]:
        texts = [tokenizer.chat([{"role": "user", "content": text}], answering=True) for text in texts]
    prompts = [tokenizer.encode(text, special=not settings["chat"])[0] for text in texts]
    trainer = build.trainer(config)
    own = {name: settings[name] for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
    ends = frozenset() if tokenizer.end is None else frozenset({tokenizer.end})
    if not isinstance(tokenizer, Bytes):
        ends |= module.ends
    module.generation = Generation(**own, ends=ends, padding=tokenizer.padding)
    _check(module, prompts, texts)
    printing = _Printing(tokenizer, ends)
    if len(prompts) == 1 and trainer.is_global_zero:
        module.generation = replace(module.generation, told=printing.add)
    batches = batches_of(prompts, settings["batch_size"], tokenizer.padding, pad=module.takes_padding)
    began = time.perf_counter()
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    predicted = trainer.predict(module, loader, ckpt_path=config["ckpt_path"])
    seconds = time.perf_counter() - began
    if not trainer.is_global_zero:
        return
    if len(prompts) == 1:
        printing.end()
    made: dict[int, list[int]] = {}
    for batch, rows in zip(batches, predicted or [], strict=True):
        for number, row in zip(batch["prompt"].tolist(), rows, strict=True):  # type: ignore[arg-type]
            made[number] = _until(row.tolist(), ends)
    with (Path(config["paths"]["output_dir"]) / TEXTS).open("w") as file:
        for number, prompt in enumerate(settings["prompts"]):
            file.write(
                json.dumps({"prompt": prompt, "text": tokenizer.decode(made[number])}, ensure_ascii=False) + "\n"
            )
    tokens = sum(map(len, made.values()))
    _end(config, trainer, {"tokens": tokens, "tokens_per_second": tokens / seconds})


def _model(config: Config) -> L.LightningModule:
    """Of a checkpoint each rank reads its own part later; a file of weights is read whole."""
    module = build.model(config)
    if config["init_from"] is not None:
        build.begin_with(module, config["init_from"])
    return module


def _tokenizer(config: Config) -> Tokenizer:
    """That of the data on which the model was trained."""
    data = config["data"]
    if GIVES.get(example_of(data)) == "bytes":
        return tokenizer_of(None)
    return tokenizer_of(data.get("tokenizer", config["model"].get("path")))


def _check(module: LanguageModel, prompts: list[list[int]], texts: list[str]) -> None:
    for prompt, text in zip(prompts, texts, strict=True):
        length = len(prompt) + module.generation.max_new_tokens
        if not prompt:
            raise ValueError(f"The prompt {text!r} has no tokens: give one that has.")
        if module.longest is not None and length > module.longest:
            raise ValueError(
                f"A prompt of {len(prompt)} tokens and --max-new-tokens {module.generation.max_new_tokens} are more "
                f"than the {module.longest} tokens that the model takes."
            )


def _until(tokens: list[int], ends: Collection[int]) -> list[int]:
    """The tokens before the end."""
    return list(takewhile(lambda token: token not in ends, tokens))


class _Printing:
    """Prints one text as it comes: what of it can't change any more."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._tokens: list[int] = []
        self._text = ""
        self._printed = 0

    def add(self, prompts: Tensor, tokens: Tensor) -> None:
        self._tokens += tokens.tolist()
        self._text = self._tokenizer.decode(_until(self._tokens, self._ends))
        self._print(self._text.rstrip("\N{REPLACEMENT CHARACTER}"))  # a character of which bytes are still to come

    def end(self) -> None:
        self._print(f"{self._text}\n")

    def _print(self, text: str) -> None:
        print(text[self._printed :], end="", flush=True)
        self._printed = max(self._printed, len(text))


def _end(config: Config, trainer: L.Trainer, metrics: Mapping[str, Any]) -> None:
    if trainer.is_global_zero:
        folder = Path(config["paths"]["output_dir"])
        record.update(folder, metrics=record.write_metrics(folder, metrics))
        record.end(folder, "completed")
