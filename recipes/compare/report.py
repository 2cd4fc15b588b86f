"""The figures as tables: in the terminal, as Markdown with what they show, and as CSV."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.clusters import counted
from recipes.compare.findings import findings
from recipes.compare.rows import Row
from recipes.tables import Cell, Table, circumstances
from recipes.traffic import KINDS

MIB, KIB = 2**20, 2**10
HELD = ("parameters", "gradients", "optimizer")
_WIDTH = 118  # of running text in the terminal


def tables(rows: Sequence[Row], loss: str) -> list[Table]:
    """Speed, memory and messages; and why there are no figures, where there are none.

    Args:
        loss: its name.
    """
    ran = [row for row in rows if row.error is None]
    failed: list[list[Cell]] = [[row.strategy, row.error] for row in rows if row.error is not None]
    return [
        _speed(ran, loss),
        _memory(ran),
        _messages(ran),
        *([Table("Not measured", {"strategy": "", "why": ""}, failed)] if failed else []),
    ]


def _speed(rows: Sequence[Row], loss: str) -> Table:
    columns = {
        "strategy": "",
        "processes": "d",
        "step (ms)": ".1f",
        "half of all (ms)": "",
        "samples/s": ",.0f",
        "tokens/s": ",.0f",
        "efficiency": ".0%",
        "blocked": ".0%",
        "no core": ".0%",
        "bubble": ".0%",
        "theory": ".0%",
        loss: ".4f",
    }
    cells: list[list[Cell]] = []
    for row in rows:
        assert row.quartiles is not None
        first, median, third = (seconds * 1e3 for seconds in row.quartiles)
        name = row.strategy if row.devices == row.processes else f"{row.strategy} ({row.devices} replicas)"
        line: list[Cell] = [name, row.processes, median, f"{first:.1f}-{third:.1f}", row.samples, row.tokens]
        cells.append([*line, row.efficiency, row.blocked, row.queued, row.bubble, row.theory, row.loss])
    return Table(
        "Speed",
        columns,
        cells,
        "Step: the median update, and the range that half of all lie in. Efficiency: throughput per device, in units "
        "of one process's. Of the threads that compute, the share of time in which they were blocked, waiting for "
        "messages; and in which they had no core, which is the machine's load. Bubble: the share of the stages' time "
        "without compute, whatever the reason, and by theory of the schedule alone.",
    )


def _memory(rows: Sequence[Row]) -> Table:
    columns = {"strategy": "", "peak, fullest (MiB)": ".1f", "mean (MiB)": ".1f", "max/mean": ".2f"}
    columns |= {f"{name} (MiB)": ".2f" for name in HELD} | {"these three (MiB)": ".2f"}
    cells: list[list[Cell]] = []
    for row in rows:
        held = [row.held[name] / MIB for name in HELD]
        cells.append([row.strategy, row.peak / MIB, fmean(row.peaks) / MIB, row.imbalance, *held, sum(held)])
    return Table(
        "Memory of a rank",
        columns,
        cells,
        "Peak: on a GPU the most that torch had allocated; on the CPU the most that was resident, above what the "
        "process had without the model. Parameters, gradients and optimizer state: exactly, the mean over the ranks.",
    )


def _messages(rows: Sequence[Row]) -> Table:
    kinds = [*KINDS, *sorted({kind for row in rows for kind in row.sent} - set(KINDS))]
    kinds = [kind for kind in kinds if any(kind in {**row.sent, **(row.expected or {})} for row in rows)]
    cells: list[list[Cell]] = [[row.strategy, *(_both(row, kind) for kind in kinds)] for row in rows]
    return Table(
        "Sent by a rank in a step (KiB): counted (by formula)",
        {"strategy": ""} | dict.fromkeys(kinds, ""),
        cells,
        "The mean over the ranks, on the wire, as a ring sends it: an all-reduce of b bytes over n ranks 2 (n - 1) / n "
        "x b, an all-gather or reduce-scatter (n - 1) / n x b. Counted: from the operators and arrivals of two steps. "
        "By formula: from the sizes of parameters and activations. A pipeline's activations have 16 bytes more a "
        "message. Scalars: metrics, norms and signals, a number each.",
    )


def _both(row: Row, kind: str) -> str | None:
    if kind not in row.sent:
        return f"0 ({row.expected[kind] / KIB:,.1f})" if row.expected and kind in row.expected else None
    counted = row.sent[kind] / KIB
    if row.expected is not None and kind in row.expected:
        return f"{counted:,.1f} ({row.expected[kind] / KIB:,.1f})"
    return f"{counted:,.1f}" if counted >= 0.05 else "< 0.1"


def headline(config: Mapping[str, Any], words: Sequence[str]) -> tuple[str, str]:
    """The command, and what it ran where: what the figures mean nothing without.

    Args:
        words: of the command line.
    """
    facts = circumstances()
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    load = " ".join(map(str, facts["load"]))
    trainer, cluster = config["trainer"], config["cluster"]
    return (
        " ".join(["python -m recipes.compare", *words]),
        f"{_named(config['model'])} on {_named(config['data'])}, {trainer['max_steps']} updates, "
        f"{counted(config)}, {cluster['threads']} thread each, {trainer['precision']}. "
        f"{facts['processor']}, {facts['cores']} cores; {versions}; {facts['date']}; load average when it ended: "
        f"{load} (1, 5, 15 minutes).",
    )


def _named(node: Mapping[str, Any]) -> str:
    numbers = (f"{k} {v}" for k, v in node.items() if isinstance(v, int) and not isinstance(v, bool))
    return f"{node.get('name') or node.get('_target_')} ({', '.join(numbers)})"


def show(head: tuple[str, str], rows: Sequence[Row], found: Sequence[Table]) -> str:
    """The report for the terminal."""
    command, circumstance = head
    parts = [command, textwrap.fill(circumstance, _WIDTH)]
    parts += [replace(table, note=textwrap.fill(table.note, _WIDTH)).text() for table in found]
    sentences = (textwrap.fill(line, _WIDTH, initial_indent="- ", subsequent_indent="  ") for line in findings(rows))
    return "\n\n".join([*parts, "What this shows", "\n".join(sentences)])


def write(folder: Path, head: tuple[str, str], rows: Sequence[Row], found: Sequence[Table]) -> None:
    """``compare.md`` and ``compare.csv``."""
    command, circumstance = head
    parts = ["# Strategies side by side", f"    {command}", circumstance, "![Bars of the figures below](compare.png)"]
    parts += ["## What this shows", "\n".join(f"- {line}" for line in findings(rows))]
    parts += [table.markdown().replace("### ", "## ", 1) for table in found]
    (folder / "compare.md").write_text("\n\n".join(parts) + "\n")
    with (folder / "compare.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(flat(rows[0])))
        writer.writeheader()
        writer.writerows(flat(row) for row in rows)


def flat(row: Row) -> dict[str, Any]:
    """Everything of a row, in seconds and bytes; empty where there is nothing."""
    first, median, third = row.quartiles or (None, None, None)
    ran = row.error is None
    return (
        {"strategy": row.strategy, "error": row.error, "processes": row.processes, "devices": row.devices}
        | {"step_s": median, "step_first_quartile_s": first, "step_third_quartile_s": third}
        | {"samples_per_s": row.samples, "tokens_per_s": row.tokens, "efficiency": row.efficiency}
        | {"blocked": row.blocked, "no_core": row.queued, "bubble": row.bubble, "bubble_by_theory": row.theory}
        | {"loss": row.loss}
        | {"peak_bytes_max": row.peak if ran else None, "peak_bytes_mean": fmean(row.peaks) if ran else None}
        | {"peak_imbalance": row.imbalance if ran else None, "peak_bytes": " ".join(f"{p:.0f}" for p in row.peaks)}
        | {f"{name}_bytes": row.held.get(name) for name in HELD}
        | {f"sent_{kind}_bytes": row.sent.get(kind, 0.0) if ran else None for kind in KINDS}
        | {f"formula_{kind}_bytes": None if row.expected is None else row.expected.get(kind, 0.0) for kind in KINDS}
    )
