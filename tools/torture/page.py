"""The page of the documentation that shows the matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tools import pages
from tools.pages import line
from tools.torture.cases import Case, cases
from tools.torture.fault import FAULTY_STEP, Kind, Moment
from tools.torture.layouts import LAYOUTS, TIMEOUT, Layout
from tools.torture.outcome import Verdict
from tools.torture.program import STEPS
from tools.torture.record import Results
from tools.torture.runner import AFTER


def _all(some: int, there: int) -> str:
    return "all" if some == there else str(some)


def write(results: Results, file: Path) -> None:
    """Write the page.

    Args:
        results: of all cases that have been run.
        file: the page.
    """
    all_cases = cases()
    versions = ", ".join(f"{name} {value}" for name, value in results.about.items() if name not in ("date", "machine"))
    times = [results.verdicts[case.name].times for case in all_cases if case.name in results.verdicts]
    again = sum(each > 1 for each in times)
    ran = f"{len(times)} of {len(all_cases)} cases have been run, {_all(again, len(times))} of them twice or more"
    parts = [
        _INTRODUCTION.format(
            layouts=len(LAYOUTS),
            cases=len(all_cases),
            steps=STEPS,
            timeout=TIMEOUT,
            after=f"{AFTER:.0f}",
            step=FAULTY_STEP,
        ),
        "\n".join(_summary(all_cases, results)),
        f"{ran}, the last on {results.about['date']}, on {results.about['machine']}; {versions}.",
        "\n".join(_wrong(all_cases, results)),
        _TABLES,
        *("\n".join(_table(layout, all_cases, results)) for layout in LAYOUTS),
    ]
    pages.write(parts, file)


def _summary(all_cases: Sequence[Case], results: Results) -> Iterator[str]:
    yield f"| | {' | '.join(Kind)} |"
    yield "|---|" + "--:|" * len(Kind)
    for layout in LAYOUTS:
        counts = []
        for kind in Kind:
            of_kind = [case for case in all_cases if case.layout == layout and case.kind == kind]
            found = [results.verdicts[case.name] for case in of_kind if case.name in results.verdicts]
            held = sum(verdict.held for verdict in found)
            counts.append(f"{held} of {len(found)}" if found else "")
        yield f"| {layout.name} | {' | '.join(counts)} |"


def _wrong(all_cases: Sequence[Case], results: Results) -> Iterator[str]:
    wrong = [case for case in all_cases if case.name in results.verdicts and not results.verdicts[case.name].held]
    if wrong:
        yield "## What didn't hold\n"
    for case in wrong:
        yield f"- {case.name}: {'; '.join(map(line, results.verdicts[case.name].problems))}."


def _table(layout: Layout, all_cases: Sequence[Case], results: Results) -> Iterator[str]:
    rows: dict[tuple[Moment, str], dict[Kind, Case]] = {}
    for case in all_cases:
        if case.layout == layout:
            rows.setdefault((case.moment, case.process), {})[case.kind] = case
    yield f"**{layout.name}**\n"
    yield f"| | | {' | '.join(Kind)} |"
    yield "|---|---|" + ":-:|" * len(Kind)
    for (moment, process), of_kinds in rows.items():
        marks = [_mark(results.verdicts.get(of_kinds[kind].name)) if kind in of_kinds else "-" for kind in Kind]
        yield f"| {moment} | {process} | {' | '.join(marks)} |"


def _mark(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return f"{verdict.ended_in or 0:.0f} s" if verdict.held else "**failed**"


_INTRODUCTION = """\
# The kill matrix

Something happens to each process of a run, at each moment, under {layouts} layouts: {cases} cases. `make torture` runs
them, which takes an hour or two, and writes this page; a case runs with the tests.

- **What runs**: `python -m recipes.train` with `resume=auto`, {steps} steps of a small model with dropout, which
  validates and saves every two steps. Ranks wait {timeout} s for each other, `strategy.timeout={timeout}`.
  Its processes are forked from one that has imported torch and Lightning, except where a signal meets a launcher whose
  workers are only starting: imports would be three quarters of a case.
- **What happens**: SIGKILL, SIGTERM, SIGSTOP, or an exception in a rank, after step {step}: while it starts, in the
  forward or the backward of a layer, in the optimizer's step, in a validation, in the middle of a file of a checkpoint,
  before the rename that puts a checkpoint in its place, or when a half of an old checkpoint is deleted. What only the
  first rank does, such as the rename, happens to the others while they wait for it. The launcher gets signals too.
- **What has to hold**: no process is left {after} s later ({timeout} s more after SIGSTOP, which others notice by their
  timeout). A checkpoint that was whole is there, or a newer one, and opens. The exit code is 75 and the status
  *preempted* after SIGTERM; otherwise the run has *failed*, and names the rank and the cause. The same command, run
  again, completes with the weights and metrics of a run that was never disturbed, bit by bit. Asynchronous pipelines
  too: they drain for a save, so the undisturbed one is saved after the same steps.
- **Left out**: SIGSTOP of a run with one process, for which nobody waits. A killed launcher can't say anything:
  `run.json` still says *running*, or *starting*."""

_TABLES = """\
## Cases

In the fields: after how many seconds nothing was left of a run for which all held. An empty field has not been run."""
