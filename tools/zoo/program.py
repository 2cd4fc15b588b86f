"""Arguments and resumable runs of the programs that train entries under layouts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.zoo.layouts import Layout
from tools.zoo.outcome import Outcome, Verdict
from tools.zoo.record import Results


def arguments(program: str, description: str | None, layouts: Iterable[Layout], out: str) -> argparse.ArgumentParser:
    """A parser of the arguments that all of these programs have.

    Args:
        program: its module.
        out: where results go by default.
    """
    names = [layout.name for layout in layouts]
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="entries whose name matches, as in 'gpt2*'")
    parser.add_argument("--layout", action="append", metavar="NAME", choices=names)
    parser.add_argument("--out", type=Path, default=Path(out), help="results, written as they come")
    parser.add_argument("--resume", action="store_true", help="keep the cases that are in --out, and run the others")
    parser.add_argument("--wrong", action="store_true", help="with --resume: run again what was wrong")
    parser.add_argument("--page", type=Path, help="write the page, from all that is in --out")
    parser.add_argument("--traces", action="store_true", help="print the tracebacks of what isn't a refusal")
    return parser


class Cases:
    """The cases of a run: which are left, and the results of the others.

    Args:
        options: of `arguments`.
        layouts: under which entries run, if the options choose none.
        file: for the results.
    """

    def __init__(self, options: argparse.Namespace, layouts: Iterable[Layout], file: Path) -> None:
        self.options, self.file = options, file
        self.layouts = [layout for layout in layouts if options.layout is None or layout.name in options.layout]
        self.results = Results.read(file) if options.resume and file.exists() else Results()

    def left(self, entry: str) -> list[Layout]:
        """The layouts under which an entry has yet to run, or is to run again."""
        known = self.results.verdicts.get(entry, {})
        return [layout for layout in self.layouts if layout.name not in known or self._again(known[layout.name])]

    def run(self, entry: str, layout: str, case: Callable[[], Verdict | None]) -> Verdict | None:
        """Run a case, keep its verdict, and print a line; None as in `Runner.run`."""
        begin = time.monotonic()
        verdict = case()
        seconds = time.monotonic() - begin
        self.results.add(entry, layout, verdict, seconds)
        self.results.write(self.file)
        if verdict is not None:
            size = "" if verdict.deviation is None else f"{verdict.deviation:.1e}"
            said = verdict.detail.splitlines()[0] if verdict.detail else ""
            line = f"{seconds:5.1f} s  {entry:48} {layout:22} {verdict.outcome:20} {size:8} {said[:220]}"
            print(line, flush=True)
            if self.options.traces and verdict.outcome.is_wrong and verdict.trace:
                print(verdict.trace, flush=True)
        return verdict

    def _again(self, verdict: Verdict | None) -> bool:
        return bool(self.options.wrong) and verdict is not None and verdict.outcome.is_wrong


def counted(results: Results) -> str:
    """The numbers of cases by outcome, as a text."""
    outcomes = [verdict.outcome for cases in results.verdicts.values() for verdict in cases.values() if verdict]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome)
