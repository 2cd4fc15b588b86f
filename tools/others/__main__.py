"""``python -m tools.others``: trains other people's modules under every layout, and compares them with one process."""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import time
from pathlib import Path

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
from tools.zoo.layouts import PLAIN, Layout
from tools.zoo.outcome import Outcome, Verdict
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
    outcomes = [verdict.outcome for cases in results.verdicts.values() for verdict in cases.values() if verdict]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome))
    if missing:
        print(f"Without results: {', '.join(missing)}")
    if options.page is not None:
        page.write(results, missing, options.page)
    return max(codes, default=1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.others", description=__doc__)
    parser.add_argument("--room", action="append", metavar="NAME", choices=list(ROOMS), help="a file of rooms/")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="entries whose name matches")
    parser.add_argument("--layout", action="append", metavar="NAME", choices=[layout.name for layout in LAYOUTS])
    parser.add_argument("--out", type=Path, default=Path("build/others"), help="results of each room, as they come")
    parser.add_argument("--resume", action="store_true", help="keep the cases that are in --out, and run the others")
    parser.add_argument("--wrong", action="store_true", help="with --resume: run again what was wrong")
    parser.add_argument("--page", type=Path, help="write the page, from all that is in --out")
    parser.add_argument("--page-only", action="store_true", help="and run nothing")
    parser.add_argument("--traces", action="store_true", help="print the tracebacks of what isn't a refusal")
    parser.add_argument("--inside", metavar="NAME", choices=list(ROOMS), help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(room: str, options: argparse.Namespace) -> int:
    """Run what isn't in the results yet; 1 if an entry was of no use."""
    file = options.out / f"{room}.json"
    results = Results.read(file) if options.resume and file.exists() else Results()
    layouts = [layout for layout in LAYOUTS if options.layout is None or layout.name in options.layout]
    runner = Runner(WorkerPool(forks=True), PATIENCE, train, judge, find)
    useless = 0
    try:
        for entry in entries(room):
            name = f"{entry.package}: {entry.name}"
            for layout in layouts:
                known = results.verdicts.get(name, {})
                if not fnmatch.fnmatchcase(entry.name, options.only) or not _is_wanted(known, layout, options.wrong):
                    continue
                begin = time.monotonic()
                try:
                    known.pop(PLAIN, None)
                    verdict, under = runner.run(module_of(room), entry, layout), layout.name
                except (UselessEntryError, WorkerError) as error:
                    verdict, under = (
                        Verdict(Outcome.CRASHED, str(error).strip().splitlines()[-1], trace=str(error)),
                        PLAIN,
                    )
                assert verdict is not None
                seconds = time.monotonic() - begin
                results.add(name, under, verdict, seconds)
                results.write(file)
                print(_line(name, under, verdict, seconds), flush=True)
                if options.traces and verdict.outcome.is_wrong and verdict.trace:
                    print(verdict.trace, flush=True)
                if under == PLAIN:
                    useless = 1
                    break
    finally:
        runner.pool.shutdown()
    return useless


def _is_wanted(known: dict[str, Verdict | None], layout: Layout, wrong: bool) -> bool:
    verdict = known.get(layout.name)
    return verdict is None or (wrong and verdict.outcome.is_wrong)


def _line(entry: str, layout: str, verdict: Verdict, seconds: float) -> str:
    size = "" if verdict.deviation is None else f"{verdict.deviation:.1e}"
    said = verdict.detail.splitlines()[0] if verdict.detail else ""
    return f"{seconds:5.1f} s  {entry:48} {layout:14} {verdict.outcome:20} {size:8} {said[:220]}"


if __name__ == "__main__":
    sys.exit(main())
