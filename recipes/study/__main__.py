"""The command line: ``python -m recipes.study asynchrony``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes import ROOT
from recipes.data.stdlib import build
from recipes.study import work
from recipes.study.arms import OPTIMIZERS, STAGES, Run, Setting, arms
from recipes.study.store import Store

STUDIES = ROOT / "docs" / "studies"


def main(arguments: Sequence[str] | None = None, setting: Setting | None = None, text: Path | None = None) -> None:
    """The study, or with ``--report`` what is to be said of it.

    Args:
        setting: other sizes than the study's, for a small form of it; its ``data`` is overwritten.
        text: folder of a text, in the form of :mod:`recipes.data.stdlib`; default: the standard library.
    """
    options = _parser().parse_args(arguments)
    plan = list(arms(options.optimizers, options.stages))
    folder = text if text is not None else build(ROOT / "data")
    setting = setting if setting is not None else Setting("")
    updates = setting.updates if options.updates is None else options.updates
    warmup = updates * setting.warmup // setting.updates
    setting = replace(setting, data=_fingerprint(folder), updates=updates, warmup=warmup)
    store = Store(options.output)
    if not options.report:
        begin = time.monotonic()

        def done(run: Run) -> None:
            arm, result = run.arm, store.results[run]
            what = "synchronous" if arm.synchronous else f"p={arm.stages} m={arm.microbatches} {arm.weights}"
            print(
                f"{(time.monotonic() - begin) / 60:6.1f} min  {arm.optimizer} {what} {arm.correction or ''} "
                f"rate {run.rate:g} seed {run.seed}: {result['final']} ({result['seconds']} s)",
                flush=True,
            )

        with store.alone():
            work.perform(setting, plan, options.seeds, store, folder, jobs=options.jobs, until=options.until, done=done)
    from recipes.study import page  # here: it draws, which runs need not wait for

    page.write(options.output, setting, plan, options.seeds, store)


def _fingerprint(folder: Path) -> str:
    meta = json.loads((folder / "meta.json").read_text())
    return f"stdlib sha256:{meta['content']}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.study",
        description="Train small models by synchronous and asynchronous pipelines' rules, and compare what they reach. "
        "It can be interrupted: a second start goes on, and loses the runs that were under way.",
    )
    parser.add_argument("what", choices=["asynchrony"])
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=STUDIES / "asynchrony", help="default: %(default)s"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each (default: %(default)s)")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=list(STAGES))
    parser.add_argument("--seeds", type=int, default=3, help="of each arm (default: %(default)s)")
    parser.add_argument("--updates", type=int, help=f"of each run (default: {Setting('').updates})")
    parser.add_argument("--until", type=float, metavar="MINUTES", help="start no more runs after so many")
    parser.add_argument("--report", action="store_true", help="only write tables, pictures and page anew")
    return parser


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from here")
