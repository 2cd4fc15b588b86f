"""``python -m tools.others``: trains other people's modules under every layout, and compares them with one process."""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import tools.workers.environment  # before torch

# isort: split
import tools.others.preloaded  # noqa: F401  before any package of an entry
from tools.others import page
from tools.others.judging import judge
from tools.others.layouts import LAYOUTS, PATIENCE, find
from tools.others.registry import ROOMS, entries, is_installed, module_of
from tools.others.training import train
from tools.workers.pool import WorkerError, WorkerPool
from tools.zoo.layouts import PLAIN
from tools.zoo.outcome import Outcome, Verdict
from tools.zoo.program import Cases, arguments, counted
from tools.zoo.record import Results
from tools.zoo.runner import Runner, UselessEntryError


def main() -> int:
    options = _parse()
    if options.inside is not None:
        return _run(options.inside, options)
    wanted = [room for room in ROOMS if options.room is None or room in options.room]
    absent = [room for room in wanted if not is_installed(room)]
    codes = [0]
    if not options.page_only:
        # A process of its own for each: packages patch torch or each other, and take seconds to import.
        command = [sys.executable, "-m", "tools.others", *sys.argv[1:], "--inside"]
        codes = [subprocess.call([*command, room]) for room in wanted if room not in absent]
    results = Results()
    missing = []
    for room in wanted:
        file = options.out / f"{room}.json"
        read = Results.read(file) if file.exists() else Results()
        results.verdicts |= read.verdicts
        results.seconds += read.seconds
        missing += [] if read.verdicts else [room]
    print(counted(results))
    if missing:
        print(f"Without results: {', '.join(missing)}")
    if options.page is not None:
        page.write(results, missing, options.page)
    return max(codes, default=1)


def _parse() -> argparse.Namespace:
    parser = arguments("tools.others", __doc__, LAYOUTS, "build/others")
    parser.add_argument("--room", action="append", metavar="NAME", choices=list(ROOMS), help="a file of rooms/")
    parser.add_argument("--page-only", action="store_true", help="and run nothing")
    parser.add_argument("--inside", metavar="NAME", choices=list(ROOMS), help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(room: str, options: argparse.Namespace) -> int:
    """Run what isn't in the results yet; 1 if an entry was of no use."""
    cases = Cases(options, LAYOUTS, options.out / f"{room}.json")
    runner = Runner(WorkerPool(forks=True), PATIENCE, train, judge, find)
    useless = 0
    try:
        for entry in entries(room):
            if not fnmatch.fnmatchcase(entry.name, options.only):
                continue
            name = f"{entry.package}: {entry.name}"
            try:
                for layout in cases.left(name):
                    cases.results.verdicts.get(name, {}).pop(PLAIN, None)
                    cases.run(name, layout.name, partial(runner.run, module_of(room), entry, layout))
            except (UselessEntryError, WorkerError) as error:
                said = str(error).strip().splitlines()[-1]
                cases.run(name, PLAIN, partial(Verdict, Outcome.CRASHED, said, trace=str(error)))
                useless = 1
    finally:
        runner.pool.shutdown()
    return useless


if __name__ == "__main__":
    sys.exit(main())
