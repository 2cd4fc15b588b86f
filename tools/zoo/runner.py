"""Runs entries under layouts, in the processes of a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.workers.pool import WorkerError, WorkerPool
from tools.zoo import layouts
from tools.zoo.layouts import TIMEOUT, Layout
from tools.zoo.outcome import Outcome, Verdict, judge
from tools.zoo.training import Report, train


class UselessEntryError(RuntimeError):
    """An entry that can't be trained in one process."""


@dataclass(slots=True)
class Runner:
    """Keeps the references of the entry that it ran last, since an entry's layouts come one after the other.

    Args:
        pool: where the ranks run.
        patience: seconds until ranks that don't even time out are given up.
        train: trains an entry on one rank, as `training.train`.
        judge: compares reports, as `outcome.judge`.
        find: a layout or reference by its name.
    """

    pool: WorkerPool
    patience: float = 3 * TIMEOUT
    train: Callable[..., Report] = train
    judge: Callable[..., Verdict] = judge
    find: Callable[[str], Layout] = layouts.find
    _of: tuple[str, str] = ("", "")
    _references: dict[tuple[str, tuple[str, ...]], list[Report]] = field(default_factory=dict)

    def run(self, room: str, entry: Any, layout: Layout) -> Verdict | None:
        """The verdict on an entry under a layout; None if it has fewer layers than the layout has stages.

        Args:
            room: the module that lists the entry.
            entry: what to train, an `Entry` or what `train` and `judge` take for one.
            layout: how to train it.

        Raises:
            UselessEntryError: the entry can't be trained in one process.
        """
        if layout.stages > entry.layers:
            return None
        plain = self._plain(room, entry)
        try:
            reports = self._train(room, entry, layout)
            layers = reports[0].layers  # a layer that is cut inside draws other random numbers
            return self.judge(
                entry, layout, reports, plain, lambda: self._reference(room, entry, layout.fallback or "", layers)
            )
        except WorkerError as error:
            return _lost(error)

    def _plain(self, room: str, entry: Any) -> Report:
        (plain,) = self._reference(room, entry, layouts.PLAIN)
        if plain.error is not None:
            raise UselessEntryError(f"{entry.name!r} fails in one process:\n{plain.error.trace}")
        if not plain.updates:
            raise UselessEntryError(f"{entry.name!r} makes no update in one process.")
        return plain

    def _reference(self, room: str, entry: Any, name: str, layers: tuple[str, ...] = ()) -> list[Report]:
        if self._of != (room, entry.name):
            self._of, self._references = (room, entry.name), {}
        if (name, layers) not in self._references:
            self._references[name, layers] = self._train(room, entry, self.find(name), layers)
        return self._references[name, layers]

    def _train(self, room: str, entry: Any, layout: Layout, layers: tuple[str, ...] = ()) -> list[Report]:
        given = (room, entry.name, layout.name, layers)
        return self.pool.run(self.train, layout.ranks, *given, init=False, timeout=self.patience)


def _lost(error: WorkerError) -> Verdict:
    """Ranks that didn't answer at all, or that died."""
    text = error.errors[error.rank]
    hung = [rank for rank, text in error.errors.items() if "had not answered" in text]
    if hung:
        return Verdict(Outcome.HANG, f"rank {hung[0]} gave no answer", trace=error.errors[hung[0]])
    return Verdict(Outcome.CRASHED, text.strip().splitlines()[-1], trace=text)
