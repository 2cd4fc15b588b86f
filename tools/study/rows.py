"""What the runs of an arm come to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean, stdev

from lightning_parallel.pipeline.staleness import copies, mean_staleness
from lightning_parallel.schedules.named import TITLES
from lightning_parallel.schedules.steady import mean_ahead
from tools.study import clock
from tools.study.arms import Arm, Run, Setting, chosen, tried, wanted
from tools.study.clock import Curve, Synchronous
from tools.study.store import Store


@dataclass(frozen=True)
class Row:
    """An arm at the rate chosen for it.

    Attributes:
        rates: tried, and the losses on the first seed by which one was chosen.
        finals: final validation loss by seed, of the seeds that are done; inf: diverged.
        read: the same of the weights that forwards read, rather than of the parameters.
        curves: by seed.
    """

    arm: Arm
    rate: float
    rates: Mapping[float, float]
    finals: Mapping[int, float]
    read: Mapping[int, float]
    curves: Mapping[int, Curve]

    @property
    def name(self) -> str:
        arm, count = self.arm, f"m={self.arm.microbatches}"
        if arm.synchronous:
            return "synchronous"
        sort = {"stash": count, "2bw": f"2BW, {count}", "latest": f"latest, {count}"}
        name = "PipeDream, m=1" if arm.weights == "stash" and arm.microbatches == 1 else sort[arm.weights]
        name = f"{name}, {str(arm.correction).replace('_', ' ')}" if arm.correction else name
        return name if arm.schedule == "1f1b" else f"{TITLES[arm.schedule]}, {name}"

    @property
    def staleness(self) -> float:
        """Of the first layers, in updates, in the mean."""
        arm = self.arm
        return mean_staleness(arm.weights, self._ahead, arm.microbatches) if not arm.synchronous else 0.0

    @property
    def copies(self) -> int:
        """Of the first layers' weights, beside their parameters."""
        return copies(self.arm.weights, self.arm.correction, self._ahead, self.arm.microbatches)

    @property
    def _ahead(self) -> float:
        """By how many microbatches the first layers' forwards are ahead of their updates."""
        return mean_ahead(self.arm.schedule, self.arm.stages, 0, self.arm.microbatches)

    @property
    def mean(self) -> float:
        return fmean(self.finals.values())

    @property
    def deviation(self) -> float | None:
        values = list(self.finals.values())
        return stdev(values) if len(values) > 1 and inf not in values else None

    def gaps(self, other: Row) -> dict[int, float]:
        """How far this one's final losses are above another's, in %, by the seeds that both have."""
        return {
            seed: 100 * (final / other.finals[seed] - 1) for seed, final in self.finals.items() if seed in other.finals
        }

    def curve(self, seeds: Collection[int] | None = None) -> Curve:
        """The mean over seeds, by default all that are done, as far as all of them have come."""
        kept = [curve for seed, curve in self.curves.items() if seeds is None or seed in seeds]
        points = zip(*kept, strict=False)
        return [(point[0][0], fmean(loss for _, loss in point)) for point in points]

    def speed_up(self, synchronous: Row, schedule: Synchronous, margin: float = 0.0) -> float | None:
        """How many times as fast as the synchronous arm, by simulated time, this one reaches its final loss.

        Args:
            schedule: of the synchronous arm, with two microbatches a stage.
            margin: above that loss, as a fraction of it; both run to there.

        Returns:
            None: never.
        """
        both = self.finals.keys() & synchronous.finals.keys()
        own, other = self.curve(both), synchronous.curve(both)
        target = other[-1][1] * (1 + margin)
        mine, theirs = clock.reached(own, target), clock.reached(other, target)
        if mine is None or theirs is None:
            return None
        arm, p = self.arm, self.arm.stages
        time = clock.asynchronous(p, arm.microbatches, mine, arm.schedule)
        return clock.synchronous(schedule, p, 2 * p, theirs) / time


def rows(setting: Setting, plan: Iterable[Arm], seeds: int, store: Store) -> dict[Arm, Row]:
    """Of the arms whose rate has been chosen, in the order of the tables."""
    found: dict[Arm, Row] = {}
    losses, all_finals = store.losses, store.finals
    for arm in plan:
        rates, _ = tried(setting, arm, losses)
        rate = chosen(setting, arm, seeds, losses)
        if rate is None:
            continue
        runs = {seed: Run(setting, arm, rate, seed) for seed in range(seeds)}
        done = {seed: store.results[run] for seed, run in runs.items() if run in store.results}
        by_rate = {each: losses[Run(setting, arm, each, 0)] for each in rates}
        finals = {seed: all_finals[runs[seed]] for seed in done}
        read = {seed: inf if result["final_read"] is None else result["final_read"] for seed, result in done.items()}
        curves = {seed: [(point[0], point[1]) for point in result["curve"]] for seed, result in done.items()}
        found[arm] = Row(arm, rate, by_rate, finals, read, curves)
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(arm: Arm) -> tuple[bool, int, int, int, bool, bool, int]:
    """Of an arm among those of its optimizer in a table: the fewest late gradients first, and corrected ones."""
    corrections = ("second_order", "error_feedback", None)
    late = arm.weights == "2bw", arm.weights == "latest"
    shape = list(TITLES).index(arm.schedule)
    return not arm.synchronous, -arm.stages, -arm.microbatches, shape, *late, corrections.index(arm.correction)


def progress(setting: Setting, plan: Iterable[Arm], seeds: int, store: Store) -> tuple[int, int]:
    """Runs done, and runs known to be needed: more, where rates beyond those tried will be wanted."""
    done = total = 0
    for arm in plan:
        runs = wanted(setting, arm, seeds, store.losses)
        decided = tried(setting, arm, store.losses)[1] is not None
        done += sum(run in store.results for run in runs)
        total += len(runs) + (0 if decided else seeds - 1)
    return done, total
