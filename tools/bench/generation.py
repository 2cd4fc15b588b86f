"""Texts out of a pipeline, beside one process: tokens a second inside ``Trainer.predict``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_parallel import PipelineStrategy
from recipes.models.generation import Generation, batches_of
from recipes.models.gpt import GPT
from recipes.models.language_model import LanguageModel
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.layers import Clock, intervals, quiet
from tools.bench.rounds import in_turn, middle, ratios

OPTIMIZER = {"name": "sgd", "lr": 0.1}  # none is made


@dataclass(frozen=True)
class Sizes:
    """A Llama of transformers, which keeps keys and values, and the recipes' GPT, which computes each token anew from
    all before it. ``texts`` at a time."""

    layers: int = 12
    width: int = 768
    vocabulary: int = 4096
    prompt: int = 64
    new: int = 24
    texts: int = 8
    batches: int = 3  # the first warms up
    rounds: int = 3


QUICK = Sizes(layers=2, width=64, vocabulary=64, prompt=4, new=4, batches=2, rounds=1)


def measure(sizes: Sizes) -> list[Table]:
    rows: list[list[Cell]] = []
    for name, make in {"Llama, keys and values kept": _llama, "GPT, nothing kept": _gpt}.items():
        one: list[float] = []
        two: list[float] = []
        for turn in range(sizes.rounds):
            for seconds, ranks in in_turn([(one, 1), (two, 2)], turn):
                seconds.append(processes.run(_seconds_of_batch, ranks, make, sizes)[0])
        tokens = sizes.texts * sizes.new
        compared = ratios(one, two)
        rows.append([name, tokens / median(one), tokens / median(two), median(compared), middle(compared, 2)])
    return [
        Table(
            f"Texts: {sizes.texts} at a time, prompts of {sizes.prompt} tokens and {sizes.new} new ones",
            {"": "", "one process (tokens/s)": ".0f", "2 stages (tokens/s)": ".0f", "ratio": ".2f", "middle half": ""},
            rows,
            f"{sizes.layers} layers of width {sizes.width}, the most likely token each time, a thread a process. "
            f"Medians of {sizes.rounds} runs of {sizes.batches - 1} batches, in turn.",
        )
    ]


def _seconds_of_batch(make: Callable[[Sizes], LanguageModel], sizes: Sizes) -> float:
    """The median batch's."""
    quiet()
    torch.manual_seed(0)
    model = make(sizes)
    model.generation = Generation(max_new_tokens=sizes.new)
    prompts = torch.randint(sizes.vocabulary, (sizes.texts * sizes.batches, sizes.prompt)).tolist()
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="auto" if dist.get_world_size() == 1 else PipelineStrategy(balance="layers"),
        callbacks=[clock],
        logger=False,
        enable_progress_bar=False,
    )
    loader: DataLoader[object] = DataLoader(batches_of(prompts, sizes.texts, 0, pad=True), batch_size=None)  # type: ignore[arg-type]
    trainer.predict(model, loader)
    return median(intervals(clock.ends))


def _gpt(sizes: Sizes) -> LanguageModel:
    return GPT(
        optimizer=OPTIMIZER,
        vocab_size=sizes.vocabulary,
        context=sizes.prompt + sizes.new,
        layers=sizes.layers,
        heads=4,
        width=sizes.width,
    )


def _llama(sizes: Sizes) -> LanguageModel:
    from recipes.models.hf import CausalLM

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "intermediate_size": 8 * sizes.width // 3 // 64 * 64,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 2 * (sizes.prompt + sizes.new),
    }
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return CausalLM(optimizer=OPTIMIZER, path=folder)
