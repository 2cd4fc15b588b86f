"""The page of the documentation that shows the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools import NOT_SEARCHED
from tools.optimizer_table.cases import LAYOUTS, UPDATES
from tools.optimizer_table.training import ENTRIES, EXACT
from tools.zoo.outcome import Outcome, Verdict
from tools.zoo.page import MARKS, line
from tools.zoo.record import Results, about

SHOWN = 500  # characters of a message


def write(results: Results, file: Path) -> None:
    """Write the page.

    Args:
        results: of a run.
        file: the page.
    """
    here = about()
    outcomes = [verdict.outcome for _, _, verdict in _all(results)]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome if outcome in outcomes)
    parts = [
        _INTRODUCTION.format(optimizers=len(results.verdicts), layouts=len(LAYOUTS), updates=UPDATES, exact=EXACT),
        f"{len(outcomes)} cases: {counts}.",
        f"Made on {here['date']}, on {here['machine']}, all cases {results.seconds / 60:.0f} minutes; "
        f"python {here['python']}, torch {here['torch']}, lightning {here['lightning']}.",
        "`=` equal, `r` refused.",
        *("\n".join(_table(source, results)) for source in dict.fromkeys(e.source for e in ENTRIES.values())),
        "\n".join(_reasons(results)),
    ]
    file.write_text("\n\n".join([NOT_SEARCHED, *parts]) + "\n")


def _table(source: str, results: Results) -> Iterator[str]:
    yield f"**{source}**\n"
    yield f"| | {' | '.join(LAYOUTS)} |"
    yield "|---|" + ":-:|" * len(LAYOUTS)
    for kind, cases in results.verdicts.items():
        if ENTRIES[kind].source == source:
            found = (cases.get(layout) for layout in LAYOUTS)
            yield f"| {kind} | {' | '.join(MARKS[verdict.outcome] if verdict else '' for verdict in found)} |"


def _reasons(results: Results) -> Iterator[str]:
    """A line for each kind of message of an optimizer, with the first such message."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for kind, layout, verdict in _all(results):
        if verdict.outcome is not Outcome.EQUAL:
            key = (kind, verdict.outcome, re.sub(r"\w+Strategy|'[^']*'", "", verdict.detail))
            groups.setdefault(key, []).append((layout, line(verdict.detail, SHOWN)))
    yield "## What isn't equal, and why\n"
    for (kind, outcome, _), found in groups.items():
        layouts, messages = zip(*found, strict=True)
        yield f"- {kind} ({', '.join(layouts)}), {outcome}: {messages[0]}"


def _all(results: Results) -> Iterator[tuple[str, str, Verdict]]:
    for kind, cases in results.verdicts.items():
        for layout, verdict in cases.items():
            if verdict is not None:
                yield kind, layout, verdict


_INTRODUCTION = """\
# Any optimizer on any layout

{optimizers} optimizers under {layouts} layouts, each compared with one process. `make optimizers` runs all of them and
writes this page; a part runs with the tests. [Your module](your-module.md#optimizers) says how an optimizer that treats
a parameter as a whole trains where ranks divide parameters, and [limits](limits.md#optimizers) what is refused.

- **What runs**: {updates} updates of a small model in float64, one real process for each rank, over gloo. Ranks divide
  its matrices and vectors unequally; one parameter is frozen, and one unused. The optimizer has two parameter groups,
  of which the first decays (LBFGS takes one; Muon has matrices only), a rate that falls, and gradients clipped by their
  norm.
- **Which optimizers**: those of torch.optim under their names there, except SparseAdam, which takes no dense gradients.
  The others are the published rules in a few lines each, in tools/optimizer_table/optimizers.py, some of them
  simplified: *HostLAMB* takes its norms to the host, *Kronecker* is Shampoo, *FloorSGD* lengthens small gradients.
  Those of the package pytorch_optimizer are used as they are. Its SOAP is left out: in one process, too, the last bit
  of the inputs changes its weights by a third. So is its Muon, which takes groups of its own.
- **What is compared**: the loss of each step and every parameter at the end, with those of Lightning's own Trainer in
  one process on the whole batch. *Equal*: the largest deviation, relative to the largest entry of the tensor, is at
  most {exact:g}. *Late stages* are the asynchronous pipeline, whose gradients are late by its nature: it is compared
  with the same late gradients in one process, without a pipeline.
- *Refused*: an error of the strategy before the first update, of the same kind on all ranks.
- **Layouts**: each axis has two ranks, so *stages x tensor* is two stages of two tensor ranks. *Fully sharded x tensor*
  is one stage."""
