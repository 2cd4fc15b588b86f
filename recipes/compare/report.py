"""The figures as tables: in the terminal, as Markdown with what they show, and as CSV."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.compare.rows import Row
from recipes.compare.run import REFERENCE
from recipes.process_rules import counted
from recipes.tables import Cell, Table, circumstances, write_csv
from recipes.traffic import KINDS

MIB, KIB = 2**20, 2**10
HELD = ("parameters", "gradients", "optimizer")
_WIDTH = 118  # of running text in the terminal
_CALM = 0.1  # share of time without a core that step times can still be compared at


def tables(rows: Sequence[Row], loss: str) -> list[Table]:
    """Speed, memory and messages; and why there are no figures, where there are none."""
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
        "ranks": "d",
        "step (ms)": ".1f",
        "half of all": "",
        "by plan": ".1f",
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
        first, median, third = (seconds * 1e3 for seconds in row.quartiles)
        name = row.strategy if row.devices == row.processes else f"{row.strategy} ({row.devices} replicas)"
        line: list[Cell] = [name, row.processes, median, f"{first:.1f}-{third:.1f}"]
        line += [row.predicted and row.predicted[0] * 1e3, row.samples, row.tokens]
        cells.append([*line, row.efficiency, row.blocked, row.queued, row.bubble, row.theory, row.loss])
    return Table(
        "Speed",
        columns,
        cells,
        "Step: the median update, the range that half of all lie in, and by a plan. Efficiency: throughput per device, "
        "in units of one process's. Of the threads that compute, the share of time in which they were blocked, waiting "
        "for messages; and in which they had no core, which is the machine's load. Bubble: the share of the stages' "
        "time without compute, whatever the reason, and by theory of the schedule alone.",
    )


def _memory(rows: Sequence[Row]) -> Table:
    columns = {"strategy": "", "peak, fullest (MiB)": ".1f", "predicted": ".1f", "mean (MiB)": ".1f", "max/mean": ".2f"}
    columns |= {f"{name} (MiB)": ".2f" for name in HELD} | {"these three (MiB)": ".2f"}
    cells: list[list[Cell]] = []
    for row in rows:
        held = [row.held[name] / MIB for name in HELD]
        line: list[Cell] = [row.strategy, row.peak / MIB, row.predicted and row.predicted[1] / MIB]
        cells.append([*line, fmean(row.peaks) / MIB, row.imbalance, *held, sum(held)])
    return Table(
        "Memory of a rank",
        columns,
        cells,
        "Peak: on a GPU the most that torch had allocated; on the CPU the most that was resident, above what the "
        "process had without the model. Predicted: tensors alone. The others: exactly, the mean over the ranks.",
    )


def _messages(rows: Sequence[Row]) -> Table:
    kinds = [*KINDS, *sorted({kind for row in rows for kind in row.sent} - set(KINDS))]
    kinds = [kind for kind in kinds if any(kind in row.sent for row in rows)]
    cells: list[list[Cell]] = [
        [row.strategy, *(row.sent[kind] / KIB if kind in row.sent else None for kind in kinds)] for row in rows
    ]
    return Table(
        "Sent by a rank in a step (KiB)",
        {"strategy": ""} | dict.fromkeys(kinds, ",.1f"),
        cells,
        "The mean over the ranks, on the wire, as a ring sends it: an all-reduce of b bytes over n ranks 2 (n - 1) / n "
        "x b, an all-gather or reduce-scatter (n - 1) / n x b. Counted from the operators and arrivals of two steps. A "
        "pipeline's activations have 16 bytes more a message. Scalars: metrics, norms and signals, a number each.",
    )


def findings(rows: Sequence[Row]) -> list[str]:
    """What the figures show, in sentences."""
    ran = {row.strategy: row for row in rows if row.error is None}
    others = [row for name, row in ran.items() if name != REFERENCE]
    found = []
    if any((row.queued or 0) > _CALM for row in ran.values()):
        found.append(
            "Threads were ready to run and had no core for a good part of the time. If other programs ran too, step "
            "times tell little; messages and losses are not affected."
        )
    if REFERENCE in ran and others:
        one, best = ran[REFERENCE], min(others, key=lambda row: row.step)
        found.append(
            f"The fastest of those over {best.devices} devices is {best.strategy}: {one.step / best.step:.2f} x as "
            f"fast as one process on one device."
        )
        off = {
            row.strategy: abs(row.loss - one.loss)
            for row in others
            if row.loss is not None and one.loss is not None and row.strategy != "pipeline_async"
        }
        if off:
            name = max(off, key=lambda name: off[name])
            found.append(
                f"The synchronous strategies' losses are within {off[name]:.1e} of one process's "
                f"{one.loss:.4f} ({name})."
            )
    return found or ["Too few strategies were measured to compare them."]


def headline(config: Mapping[str, Any], words: Sequence[str]) -> tuple[str, str]:
    """The command, and what it ran where: what the figures mean nothing without."""
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
    parts = ["# Strategies side by side", f"    {command}", circumstance]
    parts += ["## What this shows", "\n".join(f"- {line}" for line in findings(rows))]
    parts += [table.markdown().replace("### ", "## ", 1) for table in found]
    (folder / "compare.md").write_text("\n\n".join(parts) + "\n")
    write_csv(folder / "compare.csv", list(flat(rows[0])), map(flat, rows))


def flat(row: Row) -> dict[str, Any]:
    """Everything of a row, in seconds and bytes; empty where there is nothing."""
    ran = row.error is None
    first, median, third = row.quartiles if ran else (None, None, None)
    return (
        {"strategy": row.strategy, "error": row.error, "processes": row.processes, "devices": row.devices}
        | {"step_s": median, "step_first_quartile_s": first, "step_third_quartile_s": third}
        | dict(zip(("predicted_step_s", "predicted_bytes"), row.predicted or (None, None), strict=True))
        | {"samples_per_s": row.samples, "tokens_per_s": row.tokens, "efficiency": row.efficiency}
        | {"blocked": row.blocked, "no_core": row.queued, "bubble": row.bubble, "bubble_by_theory": row.theory}
        | {"loss": row.loss}
        | {"peak_bytes_max": row.peak if ran else None, "peak_bytes_mean": fmean(row.peaks) if ran else None}
        | {"peak_imbalance": row.imbalance if ran else None, "peak_bytes": " ".join(f"{p:.0f}" for p in row.peaks)}
        | {f"{name}_bytes": row.held.get(name) for name in HELD}
        | {f"sent_{kind}_bytes": row.sent.get(kind, 0.0) if ran else None for kind in KINDS}
    )
