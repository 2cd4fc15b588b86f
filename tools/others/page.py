"""The page of the documentation that shows a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from tools import pages
from tools.others.entry import BATCH, STEPS
from tools.others.judging import TOLERANCES
from tools.others.layouts import LAYOUTS, MICROBATCHES
from tools.pages import about, line, made
from tools.zoo.layouts import PLAIN
from tools.zoo.outcome import Outcome
from tools.zoo.page import Cases, each_case, of_layout, summary, table
from tools.zoo.record import Results

NAMES = [layout.name for layout in LAYOUTS]
HEAD = f"| | {' | '.join(NAMES)} |"
ORDER = [Outcome.DIFFERENT, Outcome.CRASHED, Outcome.HANG, Outcome.REFUSED, Outcome.BY_NATURE]


def write(results: Results, missing: Iterable[str], file: Path) -> None:
    """Write the page.

    Args:
        results: of a run.
        missing: rooms without results.
        file: the page.
    """
    cases = {name: verdicts for name, verdicts in results.verdicts.items() if PLAIN not in verdicts}
    useless = [name for name in results.verdicts if name not in cases]
    packages = list(dict.fromkeys(name.partition(": ")[0] for name in cases))
    versions = ", ".join(f"{package} {_version(package)}" for package in packages)
    left = [f"in one process it doesn't train here: {name}" for name in useless]
    left += [
        f"no module of tools/others/rooms/{room}.py: not installed, not importable, or not yet run" for room in missing
    ]
    left += [f"{name}: not yet run under {', '.join(absent)}" for name, absent in _absent(cases)]
    parts = [
        _INTRODUCTION.format(
            models=len(cases), packages=len(packages), steps=STEPS, batch=BATCH, microbatches=MICROBATCHES,
            exact=f"{TOLERANCES[min(TOLERANCES, key=TOLERANCES.__getitem__)]:g}", coarse=f"{max(TOLERANCES.values()):g}"
        ),
        "\n".join(_summary(cases)),
        f"{made(about(), results.seconds)}; {versions}.",
        "## Modules\n\n`=` equal, `n` different by nature, `r` refused.",
        *("\n".join(_table(package, cases)) for package in packages),
        "\n".join(_causes(cases)),
        "## What was not run\n\n" + "\n".join(f"- {said}" for said in left) if left else "",
    ]  # fmt: skip
    pages.write(parts, file)


def _summary(cases: Cases) -> Iterable[str]:
    yield from summary(cases, NAMES)
    yield f"| of | {' | '.join(str(len(of_layout(cases, name))) for name in NAMES)} |"


def _table(package: str, cases: Cases) -> Iterable[str]:
    parts = {name: name.partition(": ") for name in cases}
    return table(package, {parts[name][2]: found for name, found in cases.items() if parts[name][0] == package}, NAMES)


def _causes(cases: Cases) -> Iterable[str]:
    """A row for each kind of message, with the number of modules under each layout."""
    groups: dict[tuple[Outcome, str], list[tuple[str, str, str]]] = {}
    for name, layout, verdict in each_case(cases, NAMES):
        if verdict.outcome is not Outcome.EQUAL:
            said = line(verdict.detail)
            groups.setdefault((verdict.outcome, _kind(said)), []).append((name, layout, said))
    yield "## By cause"
    for outcome in ORDER:
        found = [(cause, rows) for (of, cause), rows in groups.items() if of is outcome]
        if not found:
            continue
        yield f"\n**{outcome[:1].upper()}{outcome[1:]}**\n"
        yield f"| {HEAD[2:].rstrip()} such as |"
        yield "|---|" + "--:|" * len(NAMES) + "---|"
        for _, rows in sorted(found, key=lambda item: -len(item[1])):
            counts = Counter(layout for _, layout, _ in rows)
            numbers = " | ".join(str(counts[layout] or "") for layout in NAMES)
            yield f"| {rows[0][2]} | {numbers} | {rows[0][0]} |"


def _kind(said: str) -> str:
    """A message without the names and numbers of a case."""
    said = re.sub(r"'[^']*'|`[^`]*`|\"[^\"]*\"", "'...'", said)
    return re.sub(r"\d[\d.e+-]*", "0", said)[:90]


def _absent(cases: Cases) -> Iterable[tuple[str, list[str]]]:
    for name, verdicts in cases.items():
        absent = [layout for layout in NAMES if verdicts.get(layout) is None]
        if absent:
            yield name, absent


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(absent)"


_INTRODUCTION = """\
# Other people's modules

{models} LightningModules of {packages} packages from PyPI, as their users write them, each trained under every layout
and compared with one process. `make others` installs the packages, runs all of them and writes this page. What becomes
of [modules drawn at random](drawn.md) from public repositories is a page of its own.

- **What runs**: {steps} steps with batches of {batch} samples, with Lightning's default checkpoint at the end,
  a logger, and validation where the module has it. One real process for each rank, over gloo, two ranks. The module,
  its loss, its optimizer and its loader are the package's own, or those of its examples; where a package trains by an
  interface of its own, they are taken from that. Nothing else is set: no module gets a plan, a list of layers or a
  function that splits its batches.
- **What is compared**: the loss of each step and every parameter after the last, with those of Lightning's own Trainer
  in one process on the whole batch. *Equal*: the largest deviation, relative to the largest entry of the tensor, is at
  most {exact}. Modules that run in float32 only are compared by their losses, to {coarse}.
- **Layouts**: `1F1B`, `ZB-V` and `asynchronous` are pipelines of two stages with {microbatches} microbatches, `tensor`
  and `fully sharded` have two ranks. An asynchronous pipeline has late gradients by its nature; here it saves a
  checkpoint after each step that is compared, which completes the step, and then goes on for as many steps without.
- *Different by nature*: the numbers are those of the same division of the batch without other ranks (one stage with the
  same microbatches, or Lightning's DDP), and under pipelines a step draws random numbers, or the strategy has warned.
  Under *fully sharded* also: the module fails in replicas, with the error that it has under Lightning's DDP; or its
  loader draws samples by itself. Under DDP all ranks draw the same ones then, here each replica draws its own.
- *Refused*: an error of the strategy before the first update, of the same kind on all ranks. *DIFFERENT*: any other
  difference, so one without a warning.
  *Crashed*: any other error. *Hang*: a rank that waits until the timeout."""
