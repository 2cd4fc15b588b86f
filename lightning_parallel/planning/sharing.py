"""A schedule on paper where stages share the cores of a machine: more of them may be ready than it has cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_parallel.schedules.actions import Action, Message, Schedule, needed, sent
from lightning_parallel.schedules.order import Order
from lightning_parallel.schedules.simulate import Simulation, Timed

_DONE = 1e-12  # seconds of work that are left of an action by rounding


def simulate_shared(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    step: Sequence[float],
    latency: float,
    first: Sequence[float],
    speed: Callable[[int], float],
) -> Simulation:
    """As :func:`.simulate`, where the stages that compute at one time make each other slower.

    Args:
        speed: at which each of so many stages goes on while all of them compute; 1 is that of the durations.

    Raises:
        ValueError: the schedule deadlocks.
    """
    order = Order(schedule)
    chunks = len(order.places)
    durations = dict(zip(order.actions, order.durations(forward, backward, step, first), strict=True))
    rows: list[list[Timed]] = [[] for _ in schedule]
    arrivals: dict[Message, tuple[int, float]] = {}  # from which stage, and when it was sent
    running: dict[int, tuple[float, float]] = {}  # by stage: when its action began, and the seconds of work left

    def ready_at(stage: int, action: Action) -> float:
        message = needed(action, chunks)
        if message is None:
            return 0.0
        if message not in arrivals:
            return math.inf
        source, time = arrivals[message]
        return time if source == stage else time + latency

    now = 0.0
    while True:
        waits = math.inf
        for stage, (actions, row) in enumerate(zip(schedule, rows, strict=True)):
            if stage not in running and len(row) < len(actions):
                ready = ready_at(stage, actions[len(row)])
                if ready <= now:
                    running[stage] = now, durations[actions[len(row)]]
                else:
                    waits = min(waits, ready)
        if not running and waits == math.inf:
            return Simulation(rows)
        rate = speed(len(running)) if running else 1.0
        until = min(waits, *(now + left / rate for _, left in running.values())) if running else waits
        for stage, (begin, left) in [*running.items()]:
            left -= (until - now) * rate
            running[stage] = begin, left
            if left <= _DONE:
                action = schedule[stage][len(rows[stage])]
                rows[stage].append(Timed(action, begin, until))
                message = sent(action, chunks)
                if message is not None:
                    arrivals[message] = stage, until
                del running[stage]
        now = until
