"""The page of the documentation that shows the table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tools import pages
from tools.optimizer_table.cases import LAYOUTS, UPDATES
from tools.optimizer_table.training import ENTRIES, EXACT
from tools.pages import about, line, made
from tools.zoo.outcome import Outcome
from tools.zoo.page import each_case, table
from tools.zoo.record import Results

SHOWN = 500  # characters of a message


def write(results: Results, file: Path) -> None:
    """Write the page.

    Args:
        results: of a run.
        file: the page.
    """
    by_source = {
        source: {kind: found for kind, found in results.verdicts.items() if ENTRIES[kind].source == source}
        for source in dict.fromkeys(entry.source for entry in ENTRIES.values())
    }
    outcomes = [verdict.outcome for _, _, verdict in each_case(results.verdicts, [*LAYOUTS])]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in Outcome if outcome in outcomes)
    parts = [
        _INTRODUCTION.format(optimizers=len(results.verdicts), layouts=len(LAYOUTS), updates=UPDATES, exact=EXACT),
        f"{len(outcomes)} cases: {counts}.",
        f"{made(about(), results.seconds)}.",
        "`=` equal, `r` refused.",
        *("\n".join(table(source, of, [*LAYOUTS])) for source, of in by_source.items()),
        "\n".join(_reasons(results)),
    ]
    pages.write(parts, file)


def _reasons(results: Results) -> Iterator[str]:
    """A line for each kind of message of an optimizer, with the first such message."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for kind, layout, verdict in each_case(results.verdicts, [*LAYOUTS]):
        if verdict.outcome is not Outcome.EQUAL:
            key = (kind, verdict.outcome, re.sub(r"\w+Strategy|'[^']*'", "", verdict.detail))
            groups.setdefault(key, []).append((layout, line(verdict.detail, SHOWN)))
    yield "## What isn't equal, and why\n"
    for (kind, outcome, _), found in groups.items():
        layouts, messages = zip(*found, strict=True)
        yield f"- {kind} ({', '.join(layouts)}), {outcome}: {messages[0]}"


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
