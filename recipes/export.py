"""``python -m recipes.export RUN OUT``: a run's model as a folder that transformers opens.

::

    python -m recipes.export logs/train/runs/2026-11-23_04-26-12-951180 my-model

``AutoModelForCausalLM.from_pretrained("my-model")`` has the weights of the run's newest checkpoint, whatever the layout
it was trained under. Adapters are exported alone, as PEFT saves them, or with ``--merge`` as a model without adapters.
The tokenizer of the folder that the run began with comes along.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes import record

_OF_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "*.jinja")


def export(run: Path, out: Path, checkpoint: Path | None = None, *, merge: bool = False) -> Path:
    """Write the model of a run.

    Args:
        run: its folder.
        out: the folder to be written.
        checkpoint: of the run; default: its newest one.
        merge: add the adapters to the weights that they adapt.

    Returns:
        The checkpoint whose weights these are.

    Raises:
        ValueError: there is no such run or checkpoint, its model is none of transformers', it has no adapters to merge,
            or ``out`` exists.
    """
    from recipes import build, resume  # here: they import torch

    config = record.read_config(run)
    if out.exists():
        raise ValueError(f"{out} exists: give a folder that doesn't, or delete it.")
    if config["model"].get("name") != "hf":
        raise ValueError(f"{run} has a model of another kind than model=hf: use python -m recipes.convert.")
    if merge and config["model"]["lora"] is None:
        raise ValueError("--merge: the run has no adapters (model.lora).")
    found = resume.newest(config) if checkpoint is None else str(checkpoint)
    if found is None:
        raise ValueError(f"{run} has no whole checkpoint: give one with --checkpoint.")
    module = build.model(config)
    build.begin_with(module, found)
    model: Any = module.model
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (model.merge_and_unload() if merge else model).save_pretrained(part)
    for pattern in _OF_TOKENIZERS:
        for file in Path(config["model"]["path"]).glob(pattern):
            shutil.copy2(file, part)
    part.rename(out)
    return Path(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.export", description="Write a run's model as a folder that transformers opens."
    )
    parser.add_argument("run", type=Path, help="the folder of a run with model=hf")
    parser.add_argument("out", type=Path, help="the folder to be written")
    parser.add_argument("--checkpoint", type=Path, help="of the run; default: its newest one")
    parser.add_argument("--merge", action="store_true", help="add LoRA's adapters to the weights that they adapt")
    given = parser.parse_args(arguments)
    try:
        found = export(given.run, given.out, given.checkpoint, merge=given.merge)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(str(error))
    print(f"{given.out}: the weights of {found}")


if __name__ == "__main__":
    main()
