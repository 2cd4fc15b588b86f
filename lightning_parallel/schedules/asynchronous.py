"""The asynchronous schedule: 1F1B that is never flushed (PipeDream, SOSP 2019), as an endless list for each stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from lightning_parallel.schedules.actions import Action, Backward, Forward, Step


class AsyncOneFOneB:
    """The endless list of one stage, produced slice by slice.

    As `one_f_one_b`, but never flushed: a stage steps as soon as the backwards of an update are done, and goes on with
    the next forward. After the fill no stage waits for the others.

    3 stages, 6 updates of 1 microbatch, drain included:

        stage 0 | F0 F1 F2  .  . B0|F3 B1|F4 B2|F5 B3| . B4| . B5|
        stage 1 |  . F0 F1  . B0|F2 B1|F3 B2|F4 B3|F5 B4| . B5| .
        stage 2 |  .  . F0 B0|F1 B1|F2 B2|F3 B3|F4 B4|F5 B5| .  .

    **Staleness.** Let w be the stage's `warmup` and m the microbatches of each update, without drains. Forward k runs
    after the backwards 0 .. k-w-1, so it uses the weights after `version` = max(0, floor((k - w) / m)) updates;
    backward k runs after floor(k / m) updates. The difference is the staleness tau of microbatch k. Once the pipeline
    is full (k >= w) it is the floor or the ceiling of w / m, and w / m in the mean over the microbatches of an update.
    In the fill (k < w) it is floor(k / m), since every forward uses the initial weights. So with no more in flight than
    needed, tau_s = stages - 1 - s for m = 1, at most 1 for m >= stages - 1, and always 0 on the last stage.

    **In flight.** Stage s holds w + 1 activations, which is stages - s. With no more than that, each message waits for
    the other side's compute, and message latency is paid in idle time. `extra_in_flight` further warm-up forwards on
    every link between neighbours avoid this at the price of staleness: w = (stages - 1 - s) * (1 + extra_in_flight). On
    fewer links it would not do, since any pair of neighbours without slack holds up all others. With equal forward
    time f, backward time b and message latency l on p stages, a microbatch takes

        max(f + b, (p (f + b) + 2 (p - 1) l) / (1 + (p - 1) (1 + extra_in_flight)))

    (the slowest loop of dependencies). That is f + b, and no stage ever waits, if 2 l <= extra_in_flight * (f + b).

    Args:
        stage: the index of the stage whose list it is.
        extra_in_flight: see above.

    Attributes:
        warmup: the forwards that run ahead of the backwards.
    """

    def __init__(self, stages: int, stage: int, extra_in_flight: int = 0) -> None:
        self.warmup = (stages - 1 - stage) * (1 + extra_in_flight)
        self._stage = stage
        self._microbatch = 0  # the number of the next forward
        self._update = 0  # the number of the next step
        self._owed: deque[tuple[int, bool]] = deque()  # microbatches in flight: number, does it end an update?

    def feed(self, count: int, *, ends_update: bool = True) -> Iterator[Action]:
        """The stage's actions when `count` new microbatches come, numbered on from the last.

        Among them are the steps that fall due. Up to `warmup` backwards, and their steps, stay owed to later calls or
        to :meth:`drain`. The bookkeeping is complete on return, however much of the iterator is consumed.

        Args:
            ends_update: if False (gradient accumulation), the update goes on with the next call.
        """
        actions: list[Action] = []
        for i in range(count):
            actions.append(Forward(self._stage, self._microbatch))
            self._owed.append((self._microbatch, ends_update and i == count - 1))
            self._microbatch += 1
            if len(self._owed) > self.warmup:
                actions += self._backward()
        return iter(actions)

    def drain(self) -> Iterator[Action]:
        """The backwards and steps still owed. The next :meth:`feed` refills, from the next microbatch number.

        An update left open by `ends_update=False` stays open: its backwards run, and its step comes when it is
        complete.
        """
        actions: list[Action] = []
        while self._owed:
            actions += self._backward()
        return iter(actions)

    def _backward(self) -> Iterator[Action]:
        microbatch, ends_update = self._owed.popleft()
        yield Backward(self._stage, microbatch)
        if ends_update:
            yield Step(self._stage, self._update)
            self._update += 1
