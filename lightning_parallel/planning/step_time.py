"""The seconds that a step of a layout takes.

Stages run their lists as the simulator has it, with each chunk's own times. Where they share cores, a step takes at
least as long as these need for the work of all. The rest is added up. Loading comes later (``costs/loading.py``). Not
modelled are other work on the same cores or links, and that a microbatch is slower or faster than the line between the
two that were tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from types import MappingProxyType

from lightning_parallel.costs.chunk_costs import ChunkCost
from lightning_parallel.costs.devices import Device
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.memory import Memory
from lightning_parallel.schedules.actions import BackwardInput
from lightning_parallel.schedules.simulate import BATCHES
from lightning_parallel.steps.between_batches import gained

OF_BATCH = 4e-3  # seconds of Lightning's hooks and loops for a batch
OF_PIPELINE = 3e-3  # more of them, in which stages agree on the end of a batch
OF_FORWARD = 0.8e-3  # seconds in which a stage runs the step's code for one forward and backward of a chunk
# Seconds of work more for each action where ranks take turns on a core: half of a tick of the kernel's clock, for which
# another one goes on, and its own data have left the caches. Fitted to five models on four ranks and two cores. In a
# list with halves each backward counts as two actions, also where the last stage runs it in one piece.
OF_TURN = 2e-3
OF_UNIT = 2.5e-3  # seconds for each fully sharded unit in which nothing is computed, where a CPU does all


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        computing: layers, and the loss.
        waiting: of the fullest list, the time in which its stage waits for others, or for a core that they have.
        messages: between replicas and tensor ranks, as far as nothing is computed meanwhile.
        updating: the optimizer.
        overhead: Lightning's, and that of running the step's code on each stage.
        loading: the time in which a step waits for its batch.
    """

    computing: float
    waiting: float = 0.0
    messages: float = 0.0
    updating: float = 0.0
    overhead: float = 0.0
    loading: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def bubble(self) -> float:
        """The part of a pipeline's time in which its stages wait for each other."""
        ran = self.computing + self.waiting + self.updating
        return self.waiting / ran if ran else 0.0


# What a step's time is spent on, in words.
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "computing": "computing",
        "waiting": "waiting for other stages",
        "messages": "messages",
        "updating": "the optimizer",
        "overhead": "running the step's code",
        "loading": "loading data",
    }
)


def of_step(
    choice: Choice,
    device: Device,
    parts: Partition,
    chunks: Sequence[ChunkCost],
    memory: Sequence[Memory],
    updates: Sequence[float],
    *,
    waits: bool,
) -> StepTime:
    """The time of a step, without loading.

    Args:
        chunks: what each takes for a microbatch.
        memory: of each stage.
        updates: seconds of the optimizer's step on each stage.
        waits: does something make stages wait for each other between two batches?
    """
    if choice.is_pipeline:
        return _of_pipeline(choice, device, chunks, memory, updates, waits)
    slower = 1 / device.speed(choice.ranks)  # while all of them compute
    forward, backward, sums = (sum(getattr(c, part) for c in chunks) for part in ("forward", "backward", "messages"))
    if choice.strategy == "fully_sharded":
        units = len(parts.layers) + 1
        each = choice.data * memory[0].parameters / units
        gathered = units * device.collective("all_gather", each, choice.data)
        summed = units * device.collective("reduce_scatter", each, choice.data)
        messages = _beside(device, forward, gathered) + _beside(device, backward, gathered + summed)
        messages += 0.0 if device.overlaps else units * OF_UNIT
    else:
        messages = _beside(device, backward, _summed(choice, device, memory))
    times = forward + backward - sums, 0.0, sums + messages, updates[0], OF_BATCH
    return StepTime(*(slower * seconds for seconds in times))


def _of_pipeline(
    choice: Choice,
    device: Device,
    chunks: Sequence[ChunkCost],
    memory: Sequence[Memory],
    updates: Sequence[float],
    waits: bool,
) -> StepTime:
    count = BATCHES + 2 * (-(-choice.stages // choice.microbatches)) if choice.is_late else 1  # with a drain
    order = choice.order(count)
    added = OF_FORWARD if choice.stages > 1 else 0.0
    turn = OF_TURN if choice.stages > 1 and device.speed(choice.ranks) < 1 else 0.0
    turns = (2 if any(isinstance(action, BackwardInput) for action in order.actions) else 1) * turn
    forward = [chunk.forward + added + turn for chunk in chunks]
    backward = [chunk.backward + turns for chunk in chunks]
    first = [(c.first * c.backward + turn) / (c.backward + turns) for c in chunks]
    durations = order.durations(forward, backward, updates, first)
    busy = [seconds / count for seconds in order.busy(durations)]
    latency = device.message(max((c.sent for c in chunks[:-1]), default=0), distance=choice.tensor * choice.data)
    goes_on = not (waits or choice.is_late) and gained(order) > 0
    period = order.run(durations, latency, BATCHES if goes_on else 1).period
    period = max(period, fmean(busy) / device.speed(choice.ranks))  # cores do the work of all ranks
    busiest = max(range(choice.stages), key=lambda stage: busy[stage])
    own = choice.chunks_of(busiest)
    overhead = (added + turn + turns) * choice.microbatches * len(own)
    exchanged = choice.microbatches * sum(chunks[c].messages for c in own)
    messages, last = exchanged, min(c.backward for c in chunks)  # while the last backward of a batch runs
    if choice.sharded:
        gathered, summed = (
            max(device.collective(kind, each.gathered, choice.data, choice.tensor) for each in memory)
            for kind in ("all_gather", "reduce_scatter")
        )
        messages += _beside(device, min(c.forward for c in chunks), gathered) + _beside(device, last, summed)
    else:
        messages += _beside(device, last, _summed(choice, device, memory))
    return StepTime(
        computing=max(0.0, busy[busiest] - overhead - updates[busiest] - exchanged),
        waiting=max(0.0, period - busy[busiest]),
        messages=messages,
        updating=updates[busiest],
        overhead=overhead + OF_BATCH + (OF_PIPELINE if choice.stages > 1 else 0.0),
    )


def _summed(choice: Choice, device: Device, memory: Sequence[Memory]) -> float:
    """Seconds in which replicas sum their gradients; 0 for one alone."""
    return max(device.collective("all_reduce", each.gradients, choice.data, choice.tensor) for each in memory)


def _beside(device: Device, computing: float, messages: float) -> float:
    """What messages add to computing."""
    return max(0.0, messages - computing) if device.overlaps else messages
