"""Make one file of a checkpoint: a plain ``.ckpt``, as Lightning saves it in one process, or safetensors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.checkpoint import convert
from recipes.command_line import typed


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=typed("convert"),
        description="Make a plain .ckpt of a checkpoint's directory, or safetensors of either.",
    )
    parser.add_argument("source", type=Path, help="a directory, a plain .ckpt, or *.safetensors")
    parser.add_argument("target", type=Path, help="to be written; *.safetensors for weights that others can read")
    parser.add_argument("--weights", action="store_true", help="leave out optimizers, loops and callbacks")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read objects other than tensors too, such as hyperparameters: that can run code from the file",
    )
    given = parser.parse_args(arguments)
    try:
        convert(given.source, given.target, save_weights_only=given.weights, weights_only=not given.trust)
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        sys.exit(str(error))
    print(given.target)


if __name__ == "__main__":
    main()
