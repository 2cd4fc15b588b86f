"""``python -m tools.torture``: kills runs at every moment, under every layout, and checks that they go on."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from tools.torture import page
from tools.torture.cases import SAMPLE, Case, cases
from tools.torture.outcome import Verdict
from tools.torture.preloaded import Process, Zygote
from tools.torture.record import RECORDED, Results
from tools.torture.runner import Runner, TortureError


def main() -> int:
    options = _parse()
    chosen = [case for case in cases(options.only) if not options.sample or case.name in SAMPLE]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    runner = Runner(options.folder.absolute(), options.keep, partial(Process, Zygote()))
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored: the case's processes go too
        signal.signal(number, signal.default_int_handler)
    results = Results.read(options.out) if options.resume and options.out.exists() else Results()
    new = _run(chosen, results, runner, options)
    wrong = [name for name, verdict in results.verdicts.items() if not verdict.held]
    print(f"{len(results.verdicts) - len(wrong)} of {len(results.verdicts)} cases held")
    if options.record:
        recorded = Results.read(RECORDED) if RECORDED.exists() else Results()
        recorded.add(new)
        recorded.write(RECORDED)
        page.write(recorded, options.page)
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.torture", description=__doc__)
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="cases whose name matches, as in '1F1B 2, rank*'"
    )
    parser.add_argument("--sample", action="store_true", help="a few cases with every moment, layout and kind of fault")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    parser.add_argument("--out", type=Path, default=Path("build/torture.json"), help="results, written as they come")
    parser.add_argument("--folder", type=Path, default=Path("build/torture"), help="for the folders of the runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time")
    parser.add_argument("--resume", action="store_true", help="keep the cases that are in --out, and run the others")
    parser.add_argument("--wrong", action="store_true", help="with --resume: run again what didn't hold")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders also where all held")
    parser.add_argument(
        "--record", action="store_true", help="keep the results beside recorded ones, and write the page"
    )
    parser.add_argument("--page", type=Path, default=Path("docs/torture.md"))
    return parser.parse_args()


def _run(chosen: Sequence[Case], results: Results, runner: Runner, options: argparse.Namespace) -> Results:
    """Run what isn't in the results yet. Returns what has been run."""
    new = Results()

    def run(case: Case) -> Verdict:
        try:
            return runner.run(case)
        except TortureError as error:
            return Verdict([f"the case itself didn't work: {error}"])

    verdicts = results.verdicts
    left = [case for case in chosen if case.name not in verdicts or (options.wrong and not verdicts[case.name].held)]
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(run, case): case for case in left}
        try:
            for future in as_completed(running):
                case, verdict = running[future], future.result()
                verdicts[case.name] = new.verdicts[case.name] = verdict
                results.write(options.out)
                print("\n    ".join([_line(case, verdict), *verdict.problems]), flush=True)
        finally:
            runner.end()
            pool.shutdown(cancel_futures=True)
    return new


def _line(case: Case, verdict: Verdict) -> str:
    ended = "" if verdict.ended_in is None else f"gone in {verdict.ended_in:.0f} s, "
    resumed = f"resumed at step {verdict.resumed_at}" if verdict.resumed_at is not None else ""
    outcome = "held  " if verdict.held else "FAILED"
    return f"{verdict.seconds:5.0f} s  {outcome}  {case.name:50} {ended}{resumed}; {verdict.said}"


if __name__ == "__main__":
    sys.exit(main())
