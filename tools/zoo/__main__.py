"""``python -m tools.zoo``: trains the zoo's models under every layout, and compares them with one process."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import tools.workers.environment  # before torch
import tools.zoo.preloaded  # noqa: F401  before Lightning: it lets torchvision be imported
from tools.pages import about
from tools.workers.pool import WorkerPool
from tools.zoo import page
from tools.zoo.layouts import LAYOUTS, Layout
from tools.zoo.outcome import Outcome, Verdict
from tools.zoo.record import PACKAGES, Results, complaints, record, recorded
from tools.zoo.registry import entries
from tools.zoo.runner import Runner, UselessEntryError


def main() -> int:
    options = _parse()
    layouts = [layout for layout in LAYOUTS if options.layout is None or layout.name in options.layout]
    results = Results.read(options.out) if options.resume and options.out.exists() else Results()
    useless = _run(results, layouts, options)
    outcomes = [verdict.outcome for cases in results.verdicts.values() for verdict in cases.values() if verdict]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome))
    if options.page is not None:
        page.write(results, about(*PACKAGES), {entry.name: entry.source for _, entry in entries()}, options.page)
    worse = complaints(results, recorded())
    print("\n".join(["Worse than recorded:", *worse]) if worse else "Nothing is worse than recorded.")
    if options.record and not worse:
        record(results)
    return 1 if worse or useless else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.zoo", description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="entries whose name matches, as in 'gpt2*'")
    parser.add_argument("--layout", action="append", metavar="NAME", choices=[layout.name for layout in LAYOUTS])
    parser.add_argument("--out", type=Path, default=Path("build/zoo.json"), help="results, written as they come")
    parser.add_argument("--resume", action="store_true", help="keep the cases that are in --out, and run the others")
    parser.add_argument("--wrong", action="store_true", help="with --resume: run again what was wrong")
    parser.add_argument("--page", type=Path, help="write the table here, from all that is in --out")
    parser.add_argument("--record", action="store_true", help="keep the outcomes, if none is worse than recorded")
    parser.add_argument("--traces", action="store_true", help="print the tracebacks of what isn't a refusal")
    return parser.parse_args()


def _run(results: Results, layouts: list[Layout], options: argparse.Namespace) -> list[str]:
    """Run what isn't in the results yet; the entries that were of no use."""
    useless = []
    runner = Runner(WorkerPool(preload=["tools.zoo.preloaded"]))
    try:
        for room, entry in entries(options.only):
            known = results.verdicts.get(entry.name, {})
            for layout in layouts:
                if layout.name in known and not (options.wrong and _is_wrong(known[layout.name])):
                    continue
                begin = time.monotonic()
                try:
                    verdict = runner.run(room, entry, layout)
                except UselessEntryError as error:
                    print(error, flush=True)
                    useless.append(entry.name)
                    break
                seconds = time.monotonic() - begin
                results.add(entry.name, layout.name, verdict, seconds)
                results.write(options.out)
                if verdict is not None:
                    print(_line(entry.name, layout.name, verdict, seconds), flush=True)
                    if options.traces and verdict.outcome.is_wrong and verdict.trace:
                        print(verdict.trace, flush=True)
    finally:
        runner.pool.shutdown()
    return useless


def _is_wrong(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.outcome.is_wrong


def _line(entry: str, layout: str, verdict: Verdict, seconds: float) -> str:
    size = "" if verdict.deviation is None else f"{verdict.deviation:.1e}"
    said = verdict.detail.splitlines()[0] if verdict.detail else ""
    return f"{seconds:5.1f} s  {entry:40} {layout:16} {verdict.outcome:20} {size:8} {said}"


if __name__ == "__main__":
    sys.exit(main())
