"""``python -m recipes.evaluate RUN [KEY=VALUE ...]``: what a run's model scores on the validation and the test data.

It takes the run's newest checkpoint, under the run's own layout unless told otherwise. Other settings may be changed
too (``data.val_path=FILE``). The numbers are printed, and written into a folder ``evaluate`` of the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from recipes.command_line import add_run, as_command, typed
from recipes.commands import run_on


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=typed("evaluate"), description="Score a run's model on the validation and the test data."
    )
    add_run(parser)
    given = parser.parse_intermixed_args(arguments)
    with as_command():
        run_on("evaluate", given.run, given.overrides, given.checkpoint, {})


if __name__ == "__main__":
    main()
