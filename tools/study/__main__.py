"""The command line: ``python -m tools.study asynchrony``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes import ROOT
from tools.study import work
from tools.study.arms import RATES, Run
from tools.study.store import Store
from tools.study.studies import STUDIES, Study

FOLDER = ROOT / "docs" / "studies"


def main(arguments: Sequence[str] | None = None, study: Study | None = None) -> None:
    """A study, or with ``--report`` what is to be said of it.

    Args:
        arguments: words of the command line; default: the program's.
        study: in the place of the one that is named: a small form of it.
    """
    options = _parser().parse_args(arguments)
    study = study if study is not None else STUDIES[options.what]
    setting, task = study.setting, study.task
    updates = setting.updates if options.updates is None else options.updates
    warmup = updates * setting.warmup // setting.updates
    setting = replace(setting, data=task.fingerprint(), updates=updates, warmup=warmup)
    plan = [
        arm
        for arm in study.plan
        if (not options.optimizers or arm.optimizer in options.optimizers)
        and (not options.stages or arm.synchronous or arm.stages in options.stages)
    ]
    if not plan:
        raise SystemExit(f"{study.name} has no arms with --optimizers {' '.join(options.optimizers)}")
    output = options.output if options.output is not None else FOLDER / study.name
    store = Store(output)
    if not options.report:
        begin = time.monotonic()

        def done(run: Run) -> None:
            arm, result = run.arm, store.results[run]
            late = f"{arm.schedule} p={arm.stages} m={arm.microbatches} {arm.weights}"
            what = "synchronous" if arm.synchronous else late
            print(
                f"{(time.monotonic() - begin) / 60:6.1f} min  {arm.optimizer} {what} {arm.correction or ''} "
                f"rate {run.rate:g} seed {run.seed}: {result['final']} ({result['seconds']} s)",
                flush=True,
            )

        with store.alone():
            work.perform(setting, plan, options.seeds, store, task, jobs=options.jobs, until=options.until, done=done)
    from tools.study import page  # here: it draws, which runs need not wait for

    page.write(output, study, setting, plan, options.seeds, store)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.study",
        description="Train small models by synchronous and asynchronous pipelines' rules, and compare what they reach. "
        "It can be interrupted: a second start goes on, and loses the runs that were under way.",
    )
    parser.add_argument("what", choices=list(STUDIES))
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: docs/studies/WHAT")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each (default: %(default)s)")
    parser.add_argument("--optimizers", nargs="+", choices=[*RATES], help="default: all of the study")
    parser.add_argument("--stages", nargs="+", type=int, help="default: all of the study")
    parser.add_argument("--seeds", type=int, default=3, help="of each arm (default: %(default)s)")
    parser.add_argument("--updates", type=int, help="of each run (default: the study's)")
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
