"""A plan as a table: one line for each layout, the fastest that fits first, and why the others lose or are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_parallel.comparison.timing import Measured
from lightning_parallel.costs.chunk_costs import ChunkCost
from lightning_parallel.planning import picture
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.memory import Memory
from lightning_parallel.planning.step_time import PARTS, StepTime
from lightning_parallel.settings import binary_size

MARGIN = 1.1  # the memory that has to be there, as a multiple of what is predicted
_SHOWN = 12
_ALIKE = 1.03  # times this near count as equal


@dataclass(frozen=True)
class Row:
    """A layout and what it will cost.

    Attributes:
        choice: the layout.
        chunks: what each takes for a microbatch.
        ranks: the memory of each stage's ranks; without stages, of one.
        timed: computes the time of a step. Schedules of many stages take seconds, and what doesn't fit needs none.
        samples: of a step, over all replicas.
        tokens: of a sample; None if they aren't known.
        devices: on which it was planned.
        fits: is the memory, with the margin, within the limit?
        waited: computes the time in which a step waits for its batch, by the seconds of its rest.
        measured: what a few steps of it have taken; None if it wasn't run.
    """

    choice: Choice
    chunks: Sequence[ChunkCost]
    ranks: Sequence[Memory]
    timed: Callable[[], StepTime] = field(repr=False, compare=False)
    samples: int
    tokens: int | None
    devices: int
    fits: bool
    waited: Callable[[float], float] = field(default=lambda step: 0.0, repr=False, compare=False)
    measured: Measured | None = None

    @property
    def seconds(self) -> float:
        """Of a step, with loading: measured, in trials that don't load, or else predicted."""
        if self.measured is None:
            return self.time.total
        return self.measured.seconds + self.waited(self.measured.seconds)

    @cached_property
    def time(self) -> StepTime:
        """Of a step, as predicted."""
        step = self.timed()
        return replace(step, loading=self.waited(step.total))

    @property
    def memory(self) -> Memory:
        """Of the rank that holds the most."""
        return max(self.ranks, key=lambda memory: memory.total)

    @property
    def strategy(self) -> str:
        """The name, as ``Trainer(strategy=...)`` and ``lightning_parallel.check`` take it."""
        return self.choice.strategy

    @property
    def options(self) -> Mapping[str, Any]:
        """The settings that go with the name."""
        return self.choice.options

    @property
    def overrides(self) -> list[str]:
        """The words for the recipes."""
        words = {f"strategy.{name}": value for name, value in self.options.items()}
        return [f"strategy={self.strategy}", f"cluster.devices={self.devices}"] + [
            f"{name}={str(value).replace(' ', '')}" for name, value in words.items()
        ]

    @property
    def needed(self) -> int:
        """The bytes that a device should have: the predicted ones, and a margin."""
        return round(MARGIN * self.memory.total)

    def lost_to(self, best: Row) -> str:
        """In words, what this layout has more of than the best one."""
        if self.seconds <= _ALIKE * best.seconds:
            return "as fast"
        own, of_best = asdict(self.time), asdict(best.time)
        most = max(PARTS, key=lambda part: own[part] - of_best[part])
        return f"{self.seconds / best.seconds:.2f} times as long: {PARTS[most]}"


@dataclass(frozen=True)
class Plan:
    """The layouts for a module, some devices and a memory, the best first.

    Attributes:
        found: all layouts that can be trained: those that were run by measured time, the others that fit by predicted
            time, then those whose gradients are late, then those that don't fit by memory.
        refused: the layouts that the module doesn't allow, with the reason.
        limit: the bytes of a device; None for no limit.
        devices: how many, and what kind, in words.
        notes: what the numbers rest on.
    """

    found: Sequence[Row]
    refused: Mapping[str, str]
    limit: int | None
    devices: str
    notes: Sequence[str]

    @property
    def rows(self) -> list[Row]:
        """The layouts that fit."""
        return [row for row in self.found if row.fits]

    @cached_property
    def best(self) -> Row:
        """The fastest layout that fits, and has the numbers of one process.

        Raises:
            ValueError: there is none. It names the layout that needs the least, and what it would need.
        """
        first = next((row for row in self.rows if not row.choice.is_late), None)
        if first is not None:
            return first
        if not self.found:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise ValueError(f"devices={self.devices}: no layout can be planned. {reasons}")
        least = min(self.found, key=lambda row: (row.choice.is_late, row.needed))
        held = least.memory
        nccl = f", NCCL's buffers {binary_size(held.communicators)}" if held.communicators else ""
        raise ValueError(
            f"memory={binary_size(self.limit or 0)}: no layout of {self.devices} fits. {least.choice} comes nearest, "
            f"and needs {binary_size(least.needed)} on its fullest rank (parameters {binary_size(held.parameters)}, "
            f"gradients {binary_size(held.gradients)}, optimizer {binary_size(held.optimizer)}, activations "
            f"{binary_size(held.activations)}{nccl}). Take more devices, smaller batches, or devices with more memory."
        )

    def records(self) -> list[dict[str, Any]]:
        """A dictionary for each layout, in seconds and bytes, such as for a data frame. Those that don't fit have no
        times."""
        best = self._best_or_problem()[0]
        return [self._record(row, best) for row in self.found]

    def draw(self, path: str | Path) -> None:
        """Draw the layouts that fit into a file: memory against time. If the best one is a pipeline, its schedule goes
        into another file beside it, whose name ends in ``_schedule``.

        Raises:
            ModuleNotFoundError: matplotlib isn't installed.
            ValueError: no layout fits.
        """
        best, path = self.best, Path(path)
        picture.draw(self.rows, None if self.limit is None else self.limit / MARGIN, path)
        if best.choice.stages > 1:
            picture.draw_schedule(best, path.with_stem(f"{path.stem}_schedule"))

    def _best_or_problem(self) -> tuple[Row | None, str | None]:
        try:
            return self.best, None
        except ValueError as error:
            return None, str(error)

    def __str__(self) -> str:
        best, problem = self._best_or_problem()
        shown = one_of_each(self.found if best is None else self.rows)[:_SHOWN]
        titles = ["layout", "microbatches", "ms a step", "measured", "tokens/s", "memory", "measured"]
        titles += ["bubble", "verdict"]
        lines = [titles, *(self._cells(row, best) for row in shown)]
        columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        aligned = [[cell.ljust(width) for cell in column] for column, width in zip(columns, widths, strict=True)]
        text = ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
        hidden = len(self.found) - len(self.rows)
        if best is not None and hidden:
            limit = binary_size(self.limit or 0)
            text.append(f"{hidden} more don't fit into {limit} with a margin of {MARGIN - 1:.0%}.")
        text += [f"{name}: refused. {reason}" for name, reason in self.refused.items()]
        text += self.notes
        if best is not None:
            text += ["", f"lp-train {' '.join(best.overrides)}"]
        return "\n".join([*text, *([problem] if problem else [])])

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows

    def _verdict(self, row: Row, best: Row | None) -> str:
        if not row.fits:
            return f"needs {binary_size(row.needed)}"
        if row.choice.is_late or best is None:  # what fits and isn't late has a best one
            return "gradients are late"
        return "best" if row is best else row.lost_to(best)

    def _record(self, row: Row, best: Row | None) -> dict[str, Any]:
        found: dict[str, Any] = {"layout": str(row.choice), "microbatches": row.choice.microbatches}
        found |= {"words": " ".join(row.overrides), "fits": row.fits, "verdict": self._verdict(row, best)}
        parts = asdict(row.time) if row.fits else dict.fromkeys(PARTS)
        found["seconds"] = row.seconds if row.fits else None
        found |= {f"{name}_seconds": seconds for name, seconds in parts.items()}
        found["bytes"] = row.memory.total
        return found | {f"{name}_bytes": nbytes for name, nbytes in asdict(row.memory).items()}

    def _cells(self, row: Row, best: Row | None) -> list[str]:
        return [
            str(row.choice),
            str(row.choice.microbatches) if row.choice.is_pipeline else "",
            f"{1000 * row.time.total:.3g}",
            f"{1000 * row.measured.seconds:.3g}" if row.measured else "",
            f"{row.samples * row.tokens / row.seconds:,.0f}" if row.tokens else "",
            binary_size(row.memory.total),
            binary_size(row.measured.held) if row.measured else "",
            f"{row.time.bubble:.0%}" if row.choice.is_pipeline else "",
            self._verdict(row, best),
        ]


def one_of_each(rows: Sequence[Row]) -> list[Row]:
    """The first row of each layout: others differ in the number of microbatches."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(str(row.choice), row)
    return list(found.values())
