"""What the commands do alike."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.launchers.launcher import WorkersFailed
from recipes.problem import ConfigError
from recipes.processes import INTERRUPTED


def typed(command: str) -> str:
    """How the user starts a command such as ``train``: as the one that runs, by its installed name or as a module."""
    program = Path(sys.argv[0])
    if command == "train" and program.stem.removeprefix("lp-") in ("check", "plan"):
        command = program.stem.removeprefix("lp-")  # it has train's help text
    return f"lp-{command}" if program.name.startswith("lp-") else f"python -m recipes.{command}"


@contextmanager
def as_command(*errors: type[Exception]) -> Iterator[None]:
    """Inside, the log goes to the terminal, and these errors (besides those of configs and workers) end the program
    with a message instead of a traceback."""
    told: tuple[type[Exception], ...] = (ConfigError, WorkersFailed, *errors)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    try:
        yield
    except told as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def add_run(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that uses a run's model: ``run``, ``overrides`` and ``checkpoint``."""
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes of its config, as strategy=single")
    parser.add_argument("--checkpoint", type=Path, help="of the run; default: its newest one")
