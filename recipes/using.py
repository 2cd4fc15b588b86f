"""What a worker does with a trained model: it scores it (``recipes.evaluate``), or lets it write
(``recipes.generate``)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from recipes import build, record
from recipes.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_of
from recipes.examples import given
from recipes.models.generation import Generation, batches_of
from recipes.models.language_model import LanguageModel

Config = Mapping[str, Any]

CHOICE = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")  # settings of Generation


def evaluate(config: Config) -> None:
    """Validate and test, as far as the module has steps for it. It leaves ``metrics.json`` in the folder. A language
    model's has perplexities, too: the exponential of the mean loss of a token.

    Raises:
        ValueError: the module has neither step.
    """
    datamodule, trainer = build.data(config), build.trainer(config)
    module = _model(config, trainer)
    metrics: dict[str, Any] = {}
    loops = {"validation_step": trainer.validate, "test_step": trainer.test}
    known = [loop for name, loop in loops.items() if is_overridden(name, module)]
    if not known:
        raise ValueError(f"A {type(module).__name__} has neither a validation_step nor a test_step: give it one.")
    for loop in known:
        loop(module, datamodule=datamodule, ckpt_path=config["ckpt_path"], verbose=False)
        metrics |= trainer.callback_metrics
    if isinstance(module, LanguageModel) and module.loss_is_cross_entropy:
        losses = [name for name in metrics if name.endswith("_loss")]
        metrics |= {f"{name.removesuffix('loss')}perplexity": metrics[name].exp() for name in losses}
    if trainer.is_global_zero:
        record.complete(Path(config["paths"]["output_dir"]), metrics)


def generate(config: Config) -> None:
    """Go on from prompts. It leaves ``texts.jsonl`` and ``metrics.json`` in the folder.

    Raises:
        ValueError: the module is no language model of the recipes, or a prompt is too long for it.
    """
    settings = config["generation"]
    trainer = build.trainer({**config, "logger": {}})  # nothing is logged: a tracking server would have an empty run
    module = _model(config, trainer)
    if not isinstance(module, LanguageModel):
        raise ValueError(f"A {type(module).__name__} writes no text: use a run of model=gpt or model=hf.")
    tokenizer = _tokenizer(config)
    prompts = _prompts(settings, tokenizer)
    module.generation = _generation(module, settings, tokenizer)
    _check_lengths(module, prompts)
    batches = batches_of(prompts, settings["batch_size"], tokenizer.padding, pad=module.takes_padding)
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    clock = _Clock()
    trainer.callbacks.append(clock)  # type: ignore[attr-defined]
    predicted = trainer.predict(module, loader, ckpt_path=config["ckpt_path"])
    if not trainer.is_global_zero:
        return
    new: dict[int, list[int]] = {}
    for batch, rows in zip(batches, predicted or [], strict=True):
        for number, row in zip(batch["prompt_number"].tolist(), rows, strict=True):  # type: ignore[arg-type]
            new[number] = [*takewhile(lambda token: token not in module.generation.end_tokens, row.tolist())]
    with (Path(config["paths"]["output_dir"]) / record.TEXTS).open("w") as file:
        for number, prompt in enumerate(settings["prompts"]):
            line = {"prompt": prompt, "text": tokenizer.decode(new[number])}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    tokens = sum(map(len, new.values()))
    metrics = {"tokens": tokens, "tokens_per_second": tokens / clock.seconds}
    record.complete(Path(config["paths"]["output_dir"]), metrics)


def _model(config: Config, trainer: L.Trainer) -> L.LightningModule:
    """Of a checkpoint each rank reads its own part later; a file of weights is read whole."""
    with build.disk_offload(trainer):
        module = build.model(config)
        if config["init_from"] is not None:
            build.begin_with(module, config["init_from"])
    return module


# -- texts -----------------------------------------------------------------------------------------------------------


def _tokenizer(config: Config) -> Tokenizer:
    """That of the data on which the model was trained."""
    data = config["data"]
    if given(data) == "bytes":
        return tokenizer_of(None)
    return tokenizer_of(data.get("tokenizer", config["model"].get("path")))


def _prompts(settings: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each prompt; a ValueError for one that has none."""
    texts = settings["prompts"]
    if settings["chat"]:
        texts = [tokenizer.chat([{"role": "user", "content": text}], answering=True) for text in texts]
    prompts = [tokenizer.encode(text, special=not settings["chat"])[0] for text in texts]
    for prompt, text in zip(prompts, texts, strict=True):
        if not prompt:
            raise ValueError(f"--prompt {text!r}: it has no tokens; give one that has.")
    return prompts


def _generation(module: LanguageModel, settings: Mapping[str, Any], tokenizer: Tokenizer) -> Generation:
    end_tokens = frozenset() if tokenizer.end is None else frozenset({tokenizer.end})
    if not isinstance(tokenizer, ByteTokenizer):  # of which the model's own settings know nothing
        end_tokens = end_tokens.union(module.end_tokens)
    chosen = {name: settings[name] for name in CHOICE}
    return Generation(**chosen, end_tokens=end_tokens, padding=tokenizer.padding)


def _check_lengths(module: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse texts that are longer than the model takes."""
    longest, new = max(map(len, prompts)), module.generation.max_new_tokens
    if module.longest is not None and longest + new > module.longest:
        raise ValueError(
            f"--max-new-tokens {new}: with a prompt of {longest} tokens they are more than the {module.longest} tokens "
            f"that the model takes; use at most {max(0, module.longest - longest)}, or a shorter prompt."
        )


class _Clock(L.Callback):
    """Seconds in which texts are made, without the start and the reading of a checkpoint."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def on_predict_batch_start(self, *args: Any) -> None:
        self._began = time.perf_counter()

    def on_predict_batch_end(self, *args: Any) -> None:
        self.seconds += time.perf_counter() - self._began
