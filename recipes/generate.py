"""``python -m recipes.generate RUN --prompt TEXT [KEY=VALUE ...]``: text from a run's language model.

::

    python -m recipes.generate logs/train/runs/2026-11-23_04-26-12-951180 --prompt "def main(" --temperature 0.8

It takes the run's newest checkpoint, in one process unless told otherwise (``strategy=tensor_parallel``). A pipeline
doesn't generate: each token would go through all stages before the next one. The texts are printed, and are in
``texts.jsonl`` in a folder ``generate`` of the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from recipes.command_line import add_run, as_command, typed
from recipes.commands import run_on
from recipes.problem import ConfigError
from recipes.record import TEXTS

SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "chat", "batch_size")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    given = _parser().parse_intermixed_args(arguments)
    with as_command(OSError):
        prompts = list(given.prompt)
        if given.prompts is not None:
            prompts += given.prompts.read_text().splitlines()
        if not prompts:
            raise ConfigError(["there is no prompt: give one with --prompt, or a file of them with --prompts"])
        generation = {"prompts": prompts, **{name: getattr(given, name) for name in SETTINGS}}
        strategies = [word for word in given.overrides if word.startswith("strategy=")] or ["strategy=single"]
        overrides = [*strategies, *(word for word in given.overrides if word not in strategies)]
        folder = run_on("generate", given.run, overrides, given.checkpoint, {"generation": generation})
    if (folder / TEXTS).exists():
        for line in (folder / TEXTS).read_text().splitlines():
            text = json.loads(line)
            print(f"{text['prompt']}\n>>> {text['text']}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=typed("generate"), description="Text from a run's language model.")
    add_run(parser)
    limits = (int, 1, 2**31), (float, 0, 1e9), (float, 1e-9, 1)
    count, heat, part = (partial(_number, *each) for each in limits)
    parser.add_argument("--prompt", action="append", default=[], help="what a text goes on from; may be given again")
    parser.add_argument("--prompts", type=Path, help="a file with a prompt in each line")
    parser.add_argument("--chat", action="store_true", help="prompts are what a user says, and the model answers")
    parser.add_argument("--max-new-tokens", type=count, default=64, help="of each text, at most (64)")
    parser.add_argument("--temperature", type=heat, default=0.0, help="0 (default): the most likely token")
    parser.add_argument("--top-k", type=count, help="draw among so many of the most likely tokens")
    likely = "draw among the most likely tokens that together have this probability"
    parser.add_argument("--top-p", type=part, help=likely)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument("--batch-size", type=count, default=8, help="prompts at a time (8)")
    return parser


def _number(kind: type[float], least: float, most: float, text: str) -> float:
    if not least <= kind(text) <= most:
        raise argparse.ArgumentTypeError(f"give a number from {least:g} to {most:g}")
    return kind(text)


if __name__ == "__main__":
    main()
