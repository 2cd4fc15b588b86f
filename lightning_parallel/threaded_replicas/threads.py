"""A thread for every replica, all in the state of the thread that calls them.

Random numbers: the replicas of a process share its generators (torch's of the CPU, Python's, NumPy's). In threads that
run at the same time, chance would decide which replica gets which numbers, and a recomputation (activation
checkpointing), which sets a generator back, would spoil the others' numbers. So replicas that draw take turns, the
first one first. GPUs have generators of their own, and a turn there only orders the launch of kernels.

State that is shared on purpose (metrics) makes replicas wait for their predecessors too: see :class:`Turns`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from threading import Event
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class Turns:
    """The order of the replicas, for whatever needs one. No replica waits for one that comes later.

    Args:
        count: the number of replicas.
    """

    def __init__(self, count: int) -> None:
        self._ended = [Event() for _ in range(count)]

    def wait(self, replica: int) -> None:
        """Wait until all earlier replicas have ended their calls. From then on this replica is alone with later ones,
        which wait for it."""
        for event in self._ended[:replica]:
            event.wait()

    def end(self, replica: int) -> None:
        self._ended[replica].set()


class ReplicaThreads:
    """A thread for each device, until :meth:`close`.

    Args:
        devices: one for each replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._pool = ThreadPoolExecutor(len(self.devices), thread_name_prefix="replica")

    def apply(self, calls: Sequence[Callable[[], T]], turns: Turns, *, in_turn: bool = False) -> list[T]:
        """Call each in the thread of its replica, with this thread's gradient, inference and autocast modes.

        Args:
            calls: of the first replicas, at most as many as there are devices.
            turns: of the calls. Each ends with its call.
            in_turn: run one call after the other.

        Raises:
            BaseException: that of the first replica that failed, with a note that names it, when all have ended.
        """
        enter = _state_here(self.devices)

        def run(replica: int, call: Callable[[], T]) -> T:
            try:
                if in_turn:
                    turns.wait(replica)
                with enter(self.devices[replica]):
                    return call()
            finally:
                turns.end(replica)

        futures = [self._pool.submit(run, replica, call) for replica, call in enumerate(calls)]
        wait(futures)
        for replica, future in enumerate(futures):
            error = future.exception()
            if error is not None:
                error.add_note(f"This was raised in replica {replica} of {len(calls)}, on {self.devices[replica]}.")
                try:
                    raise error
                finally:
                    del error, future, futures  # or this frame and the traceback would keep each other alive
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def generator_states(devices: Sequence[torch.device]) -> tuple[Any, ...]:
    """The states of the generators that several replicas draw from. If they differ after a call, it drew."""
    numpy: Any = np.random.get_state(legacy=False)["state"]
    shared = {device for device in devices if device.type == "cuda" and devices.count(device) > 1}
    on_gpus = [torch.cuda.get_rng_state(device).numpy().tobytes() for device in shared]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy["key"].tobytes(), numpy["pos"], on_gpus


def _state_here(devices: Sequence[torch.device]) -> Callable[[torch.device], ExitStack]:
    """What torch keeps for each thread separately, as this thread has it. Another one, which has the defaults, enters
    it for its device."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
    streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}

    def enter(device: torch.device) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(gradients))
        for kind, dtype in autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        if device in streams:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(streams[device]))
        return stack

    return enter
