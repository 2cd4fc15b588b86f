"""The page of the documentation that shows a run of the zoo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tools import pages
from tools.pages import line
from tools.zoo.layouts import LAYOUTS, MICROBATCHES
from tools.zoo.outcome import TOLERANCES, Outcome, Verdict
from tools.zoo.record import Results

MARKS = {
    Outcome.EQUAL: "=",
    Outcome.BY_NATURE: "n",
    Outcome.REFUSED: "r",
    Outcome.DIFFERENT: "**different**",
    Outcome.CRASHED: "**crashed**",
    Outcome.HANG: "**hang**",
}
NAMES = [layout.name for layout in LAYOUTS]
Cases = Mapping[str, Mapping[str, Verdict | None]]  # by entry and layout


def write(results: Results, about: dict[str, str], sources: dict[str, str], file: Path) -> None:
    """Write the page.

    Args:
        results: of a run.
        about: where and with what it ran.
        sources: the library of each entry, in the order of the table.
        file: the page.
    """
    cases = {name: results.verdicts[name] for name in sources if name in results.verdicts}
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name not in ("date", "machine"))
    parts = [
        _INTRODUCTION.format(models=len(cases), tolerance=f"{min(TOLERANCES.values()):g}", microbatches=MICROBATCHES),
        "\n".join(summary(cases, NAMES)),
        f"One run on {about['date']}, on {about['machine']}, {results.seconds / 60:.0f} minutes; {versions}.",
        _MODELS,
        *(
            "\n".join(table(f"{source[:1].upper()}{source[1:]}", some, NAMES))
            for source in dict.fromkeys(sources.values())
            if (some := {name: found for name, found in cases.items() if sources[name] == source})
        ),
        "\n".join(_wrong(cases)),
        "\n".join(_refusals(cases)),
        "\n".join(_natures(cases)),
    ]
    pages.write(parts, file)


def _wrong(cases: Cases) -> Iterable[str]:
    """One line for each layout of each entry: none of them should be there."""
    wrong = [(name, layout, verdict) for name, layout, verdict in each_case(cases, NAMES) if verdict.outcome.is_wrong]
    if not wrong:
        return
    yield "## What is wrong\n"
    for name, layout, verdict in wrong:
        size = "" if verdict.deviation is None else f" by {verdict.deviation:.0e}"
        yield f"- {name}, {layout}: {verdict.outcome}{size}. {line(verdict.detail)}"


def _refusals(cases: Cases) -> Iterable[str]:
    """A line for each message of an entry, in the order of the tables."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, layout, verdict in each_case(cases, NAMES):
        if verdict.outcome is Outcome.REFUSED:
            groups.setdefault((name, line(verdict.detail)), []).append(layout)
    if not groups:
        return
    yield "## What is refused, and why\n"
    for (name, message), layouts in groups.items():
        yield f"- {name} ({', '.join(layouts)}): {message}"


def _natures(cases: Cases) -> Iterable[str]:
    groups: dict[str, list[str]] = {}
    for name, _, verdict in each_case(cases, NAMES):
        if verdict.outcome is Outcome.BY_NATURE and name not in groups.setdefault(verdict.detail, []):
            groups[verdict.detail].append(name)
    if not groups:
        return
    yield "## What is different by nature, and why\n"
    for reason, names in sorted(groups.items()):
        yield f"- {reason[:1].upper()}{reason[1:]}: {'; '.join(names)}."


def summary(cases: Cases, layouts: Sequence[str]) -> Iterator[str]:
    """A table with the number of cases of each outcome under each layout."""
    yield f"| | {' | '.join(layouts)} |"
    yield "|---|" + "--:|" * len(layouts)
    for outcome in Outcome:
        counts = [sum(verdict.outcome == outcome for verdict in of_layout(cases, layout)) for layout in layouts]
        yield f"| {outcome} | {' | '.join(map(str, counts))} |"


def table(title: str, cases: Cases, layouts: Sequence[str]) -> Iterator[str]:
    """A table of marks: entries by layouts."""
    yield f"**{title}**\n"
    yield f"| | {' | '.join(layouts)} |"
    yield "|---|" + ":-:|" * len(layouts)
    for name, of_layouts in cases.items():
        found = (of_layouts.get(layout) for layout in layouts)
        yield f"| {name} | {' | '.join(MARKS[verdict.outcome] if verdict else '' for verdict in found)} |"


def of_layout(cases: Cases, layout: str) -> list[Verdict]:
    return [verdict for of_layouts in cases.values() if (verdict := of_layouts.get(layout)) is not None]


def each_case(cases: Cases, layouts: Sequence[str]) -> Iterator[tuple[str, str, Verdict]]:
    """Each verdict, with its entry and layout."""
    for name, of_layouts in cases.items():
        for layout in layouts:
            verdict = of_layouts.get(layout)
            if verdict is not None:
                yield name, layout, verdict


_INTRODUCTION = """\
# The zoo

{models} small models that a user might bring, unmodified, each trained under every layout and compared with one
process. `make zoo` runs all of them and writes this page; a sample runs with the tests.

- **What runs**: four steps with batches of 8 samples, in float64, by SGD with momentum (a few by other optimizers). One
  real process for each rank, over gloo. Layouts are the strategies with nothing but these settings; no model gets a
  plan or a list of layers.
- **What is compared**: the loss of each step, on each rank, and every parameter at the end, with those of Lightning's
  own Trainer in one process on the whole batch. *Equal*: the largest deviation, relative to the largest entry of the
  tensor, is at most {tolerance}. A few models run in float32, since a kernel of theirs has no float64; their limit is
  2e-05.
- **Pipelines** split the batch into {microbatches} microbatches, *fully sharded* into the shares of 2 ranks. Some
  models can't be equal then by their nature: those with BatchNorm, in-batch negatives or dropout. They count as
  *different by nature* only if the numbers don't depend on the number of ranks: pipelines are compared with
  `PipelineStrategy` in one stage with the same microbatches and layers, and *fully sharded* with Lightning's DDP. For
  random numbers under tensor parallelism there is no such comparison: heads draw on the rank that has them.
- *Refused*: an error before the first update, of the same kind on all ranks. *Crashed*: any other error. *Hang*: a rank
  that waits for another until the timeout.

The number behind a layout's name is that of its ranks. *Recomputed* is 1F1B with activation checkpointing, *sequence*
is tensor parallelism with sequence parallelism. In an empty field, the model has fewer layers than the layout has
stages, or the run left the case out."""

_MODELS = """\
## Models

`=` equal, `n` different by nature, `r` refused."""
