"""The seconds that a step of a layout takes.

Stages run their lists as the simulator has it, with each chunk's own times. The rest is added up. Loading comes later
(``costs/loading.py``). Not modelled are other work on the same cores or links, and that a microbatch is slower or
faster than the line between the two that were tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

from lightning_parallel.costs.chunk_costs import ChunkCost
from lightning_parallel.costs.devices import Device
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.planning.memory import Memory
from lightning_parallel.planning.sharing import simulate_shared
from lightning_parallel.schedules.actions import Step
from lightning_parallel.schedules.simulate import BATCHES, between, repeated
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
        waiting: of the fullest list, the time in which its stage waits for others.
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
    slower = 1 / device.speed(choice.ranks)  # while all of them compute
    forward, backward = slower * sum(c.forward for c in chunks), slower * sum(c.backward for c in chunks)
    if not choice.is_pipeline:
        sums = slower * sum(c.messages for c in chunks)
        messages = slower * _of_replicas(choice, device, memory[0], len(parts.layers) + 1, forward, backward)
        return StepTime(forward + backward - sums, 0.0, sums + messages, slower * updates[0], slower * OF_BATCH)
    added = OF_FORWARD if choice.stages > 1 else 0.0
    turn = OF_TURN if choice.stages > 1 and slower > 1 else 0.0
    goes_on = not (waits or choice.is_late) and gained(choice.order()) > 0
    busy_of, period = _simulated(choice, device, chunks, updates, added, turn, goes_on)
    busiest = max(range(choice.stages), key=lambda stage: busy_of[stage])
    busy = busy_of[busiest]
    of_chunk = added + (3 if choice.order().has_halves else 2) * turn
    overhead = of_chunk * choice.microbatches * len(parts.chunks_of(busiest))
    messages = exchanged = choice.microbatches * sum(chunks[c].messages for c in parts.chunks_of(busiest))
    last = min(c.backward for c in chunks)  # meanwhile the last backward of a batch runs
    if choice.sharded:
        gathered, summed = (
            max(device.collective(kind, each.gathered, choice.data, choice.tensor) for each in memory)
            for kind in ("all_gather", "reduce_scatter")
        )
        messages += _beside(device, min(c.forward for c in chunks), gathered) + _beside(device, last, summed)
    elif choice.data > 1:
        messages += _beside(device, last, max(_summed(choice, device, each) for each in memory))
    of_batch = OF_BATCH + (OF_PIPELINE if choice.stages > 1 else 0.0)
    computing = max(0.0, busy - overhead - updates[busiest] - exchanged)
    return StepTime(computing, max(0.0, period - busy), messages, updates[busiest], overhead + of_batch)


def _of_replicas(choice: Choice, device: Device, memory: Memory, units: int, forward: float, backward: float) -> float:
    if choice.strategy == "fully_sharded":
        each = choice.data * memory.parameters / units
        gathered = units * device.collective("all_gather", each, choice.data)
        summed = units * device.collective("reduce_scatter", each, choice.data)
        more = 0.0 if device.overlaps else units * OF_UNIT
        return _beside(device, forward, gathered) + _beside(device, backward, gathered + summed) + more
    return _beside(device, backward, _summed(choice, device, memory))


def _summed(choice: Choice, device: Device, memory: Memory) -> float:
    """Seconds in which replicas sum their gradients."""
    return device.collective("all_reduce", memory.gradients, choice.data, choice.tensor)


def _beside(device: Device, computing: float, messages: float) -> float:
    """What messages add to computing."""
    return max(0.0, messages - computing) if device.overlaps else messages


def _simulated(
    choice: Choice,
    device: Device,
    chunks: Sequence[ChunkCost],
    updates: Sequence[float],
    added: float,
    turn: float,
    goes_on: bool,
) -> tuple[list[float], float]:
    """The lists on paper: for each stage the seconds of an update in which it computes; and the seconds between
    updates, or of the single batch."""
    count = BATCHES + 2 * (-(-choice.stages // choice.microbatches)) if choice.is_late else 1
    order = choice.order(count)
    largest = max((chunk.sent for chunk in chunks[:-1]), default=0)
    latency = device.message(largest, distance=choice.tensor * choice.data)
    forward = [chunk.forward + added + turn for chunk in chunks]
    turns = (2 if order.has_halves else 1) * turn
    backward = [chunk.backward + turns for chunk in chunks]
    first = [(c.first * c.backward + turn) / (c.backward + turns) for c in chunks]
    batches = BATCHES if goes_on else 1
    if device.speed(choice.ranks) == 1:  # each has a core
        durations = order.durations(forward, backward, updates, first)
        busy = [seconds / count for seconds in order.busy(durations)]
        return busy, _period(order.run(durations, latency, batches).updates)

    def speed(stages: int) -> float:
        return device.speed(stages * choice.data * choice.tensor)

    schedule = repeated(order.schedule, batches)
    shared = simulate_shared(schedule, forward, backward, updates, latency, first, speed)
    ends = [[timed.end for timed in row if isinstance(timed.action, Step)] for row in shared.rows]
    return [seconds / len(ends[0]) for seconds in shared.busy], _period(ends)


def _period(updates: Sequence[Sequence[float]]) -> float:
    """The seconds from an update to the next one, by the ends of those of each stage; of a single batch, all."""
    last = updates[-1]
    return max(stage[-1] for stage in updates) if len(last) == 1 else between(last)
