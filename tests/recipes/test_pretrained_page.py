"""docs/pretrained.md: its commands, as printed and one after the other, lead from a folder to a folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes import ROOT, commands, evaluate, export, generate, record
from recipes.record import TEXTS
from tests.recipes.runs import in_the_pool
from tests.recipes.test_configs import composed
from tests.recipes.tiny import chats, model, texts
from tests.test_pages import commands as commands_of
from tools.workers.pool import WorkerPool

PAGE = commands_of(ROOT / "docs" / "pretrained.md")
SMALL = [
    "data.context=32", "data.batch_size=4", "trainer.max_steps=2", "trainer.limit_val_batches=1", "logger=none",
    "print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
]  # fmt: skip
AFTER: dict[str, Callable[[Sequence[str]], None]] = {
    "recipes.evaluate": evaluate.main,
    "recipes.generate": generate.main,
    "recipes.export": export.main,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page takes for granted."""
    model(tmp_path / "my-model", longest=256)
    chats(tmp_path / "chats.jsonl")
    texts(tmp_path / "texts.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_there(here: Path) -> None:
    """What the page promises."""
    scores = [record.read_metrics(folder) for folder in sorted((here / "runs" / "pipeline" / "evaluate").iterdir())]
    assert len(scores) == 2 and scores[0].keys() == {"val_loss", "test_loss", "val_perplexity", "test_perplexity"}
    (texts_of,) = (here / "runs" / "adapters" / "generate").iterdir()
    lines = [json.loads(line) for line in (texts_of / TEXTS).read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["2 + 2?", "3 + 3?"]
    outputs = {}
    for name in ("my-model", "my-new-model", "my-adapters", "my-merged-model"):
        opened = AutoModelForCausalLM.from_pretrained(here / name, dtype=torch.float64)
        with torch.no_grad():
            outputs[name] = opened(torch.arange(16)[None]).logits
        assert name == "my-model" or list((here / name).glob("tokenizer.json"))
    assert torch.allclose(outputs["my-adapters"], outputs["my-merged-model"], rtol=0, atol=1e-5)
    assert not torch.allclose(outputs["my-adapters"], outputs["my-model"], rtol=0, atol=1e-5)
    assert not torch.allclose(outputs["my-new-model"], outputs["my-model"], rtol=0, atol=1e-5)


@pytest.mark.thorough
def test_its_commands_do_what_it_says(pool: WorkerPool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pool's processes, with fewer steps."""
    monkeypatch.setattr(commands, "launch", lambda config, choices, overrides: in_the_pool(pool, config, overrides))
    assert len(PAGE) == 10
    run_page(pool, here, PAGE, SMALL)
    assert_there(here)


def test_its_rates_are_those_of_the_experiments() -> None:
    for words in (shlex.split(command) for command in PAGE if "recipes.train" in command):
        if not any(word.startswith("model.lora=") for word in words):
            line = [word for word in words[3:] if not word.startswith("hydra.")]
            rate = composed("experiment=hf_full_pipeline", "data.path=x", "model.path=x")["optimizer"]["lr"]
            assert composed(*line)["optimizer"]["lr"] == rate


def run_page(pool: WorkerPool, here: Path, page: Sequence[str], small: Sequence[str]) -> None:
    """Do what commands do, in the pool's processes.

    Args:
        pool: of processes.
        here: the folder from which they are started.
        page: the commands.
        small: further overrides for those that train.
    """
    for command in page:
        _, _, module, *arguments = shlex.split(command)
        if module != "recipes.train":
            AFTER[module](arguments)
            continue
        (folder,) = (here / word.partition("=")[2] for word in arguments if word.startswith("hydra.run.dir="))
        line = [*(word for word in arguments if not word.startswith("hydra.")), *small]
        config = composed(*line, f"paths.data_dir={here / 'data'}", folder=folder)
        in_the_pool(pool, config, line)
