"""The cases of the matrix: every rank, and the launcher, at every moment, under every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from tools.torture.fault import LAUNCHER, Kind, Moment
from tools.torture.layouts import LAYOUTS, Layout


@dataclass(frozen=True, slots=True)
class Case:
    """Something happens to one process of a run.

    Args:
        layout: of the run.
        target: the rank that it happens to, or :data:`LAUNCHER`.
        moment: when.
        kind: what.
    """

    layout: Layout
    target: int
    moment: Moment
    kind: Kind

    @property
    def process(self) -> str:
        """The target, in words."""
        return "launcher" if self.target == LAUNCHER else f"rank {self.target}"

    @property
    def name(self) -> str:
        return f"{self.layout.name}, {self.process}, {self.moment}, {self.kind}"

    @property
    def by(self) -> int:
        """The rank that reaches the moment. The launcher and the first rank alone reach some."""
        alone = {Moment.RENAME, Moment.PRUNING} | (set() if self.layout.all_write else {Moment.WRITING})
        return 0 if self.target == LAUNCHER or self.moment in alone else self.target

    @property
    def is_sent(self) -> bool:
        """Does the case itself send the signal, before a worker has imported anything that could?"""
        return self.target == LAUNCHER and self.moment is Moment.START


def cases(pattern: str = "*") -> list[Case]:
    """Those whose name matches, a layout after the other."""
    return [case for case in _all() if fnmatch(case.name, pattern)]


def _all() -> Iterator[Case]:
    for layout in LAYOUTS:
        for moment in Moment:
            for target in (LAUNCHER, *range(layout.ranks)):
                for kind in _kinds(layout, target):
                    yield Case(layout, target, moment, kind)


def _kinds(layout: Layout, target: int) -> tuple[Kind, ...]:
    if target == LAUNCHER:
        return Kind.KILL, Kind.TERM
    if layout.ranks == 1:  # nobody waits for a process that is alone
        return Kind.KILL, Kind.TERM, Kind.ERROR
    return tuple(Kind)


# Each moment, kind, layout and process at least once.
SAMPLE = (
    "1F1B 2, rank 1, backward, SIGKILL",
    "1F1B 2, rank 0, forward, SIGSTOP",
    "ZB-V 2, rank 1, backward, exception",
    "async 2, rank 1, optimizer step, SIGTERM",
    "async 2, rank 0, writing, SIGKILL",
    "tensor 2, rank 1, start-up, SIGSTOP",
    "tensor 2, launcher, backward, SIGKILL",
    "fsdp 2, rank 1, writing, exception",
    "fsdp 2, rank 1, before the rename, SIGSTOP",
    "ddp 2, rank 0, before the rename, SIGKILL",
    "ddp 2, rank 1, validation, SIGTERM",
    "single, rank 0, pruning, SIGKILL",
    "1F1B 2 x data 2, rank 0, before the rename, SIGKILL",
    "1F1B 2 x data 2, rank 3, optimizer step, exception",
    "1F1B 2, launcher, start-up, SIGKILL",
)
# Runs with the tests.
SMALL_SAMPLE = SAMPLE[:1]
