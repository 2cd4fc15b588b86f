"""``python -m recipes.evaluate RUN [KEY=VALUE ...]``: what a run's model scores on the validation and the test data.

::

    python -m recipes.evaluate logs/train/runs/2026-11-23_04-26-12-951180 strategy=single

It takes the run's newest checkpoint, under the run's own layout unless told otherwise. Other settings may be changed
too (``data.val_path=FILE``). The numbers are printed, and written into a folder ``evaluate`` of the run.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.commands import run_on
from recipes.launchers.launcher import WorkersFailed
from recipes.problem import ConfigError
from recipes.processes import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.evaluate", description="Score a run's model on the validation and the test data."
    )
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes of its config, as strategy=single")
    parser.add_argument("--checkpoint", type=Path, help="of the run; default: its newest one")
    given = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    try:
        run_on("evaluate", given.run, given.overrides, given.checkpoint, {})
    except (ConfigError, WorkersFailed) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
