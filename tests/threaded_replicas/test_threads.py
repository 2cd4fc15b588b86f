"""Calls in threads: together, in the caller's state, in turn where they have to be; errors by replica."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_parallel.threaded_replicas.threads import ReplicaThreads, Turns, generator_states

COUNT = 3
CPUS = [torch.device("cpu")] * COUNT


@pytest.fixture
def threads() -> Iterator[ReplicaThreads]:
    opened = ReplicaThreads(CPUS)
    yield opened
    opened.close()


def test_replicas_run_at_the_same_time(threads: ReplicaThreads) -> None:
    barrier = threading.Barrier(COUNT, timeout=20)  # broken, unless all are in their calls
    results = threads.apply([barrier.wait] * COUNT, Turns(COUNT))
    assert sorted(results) == list(range(COUNT))


def test_results_are_in_the_order_of_the_replicas(threads: ReplicaThreads) -> None:
    def late(i: int) -> int:
        time.sleep(0.02 * (COUNT - i))
        return i

    assert threads.apply([partial(late, i) for i in range(COUNT)], Turns(COUNT)) == list(range(COUNT))


def test_replicas_in_turn_run_one_after_the_other(threads: ReplicaThreads) -> None:
    events: list[tuple[str, int]] = []

    def call(i: int) -> None:
        events.append(("begin", i))
        time.sleep(0.02 * (COUNT - i))
        events.append(("end", i))

    threads.apply([partial(call, i) for i in range(COUNT)], Turns(COUNT), in_turn=True)
    assert events == [(what, i) for i in range(COUNT) for what in ("begin", "end")]


def test_a_turn_waits_for_all_replicas_before(threads: ReplicaThreads) -> None:
    turns, order = Turns(COUNT), []

    def call(i: int) -> None:
        if i == 1:
            return  # ends without a turn of its own: the next has to wait for replica 0 all the same
        time.sleep(0.1 if i == 0 else 0)
        turns.wait(i)
        order.append(i)

    threads.apply([partial(call, i) for i in range(COUNT)], turns)
    assert order == [0, 2]


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled(),
    )  # fmt: skip


@pytest.mark.parametrize("mode", [
    torch.enable_grad, torch.no_grad, torch.inference_mode,
    lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    lambda: torch.autocast("cpu", dtype=torch.float16),
])  # fmt: skip
def test_threads_have_the_modes_of_the_thread_that_calls(threads: ReplicaThreads, mode: Callable[[], Any]) -> None:
    before = threads.apply([modes] * COUNT, Turns(COUNT))
    with mode():
        assert threads.apply([modes] * COUNT, Turns(COUNT)) == [modes()] * COUNT
    assert threads.apply([modes] * COUNT, Turns(COUNT)) == before  # and nothing stays


@pytest.mark.parametrize("in_turn", [False, True])
def test_an_error_keeps_its_type_and_names_the_first_replica_that_failed(
    threads: ReplicaThreads, in_turn: bool
) -> None:
    ended = []

    def call(i: int) -> None:
        if i:
            raise KeyError(i)
        time.sleep(0.05)
        ended.append(i)

    with pytest.raises(KeyError, match="1") as caught:
        threads.apply([partial(call, i) for i in range(COUNT)], Turns(COUNT), in_turn=in_turn)
    assert caught.value.__notes__ == ["This was raised in replica 1 of 3, on cpu."]
    assert ended == [0]  # all have ended before it is raised
    assert threads.apply([int] * COUNT, Turns(COUNT)) == [0] * COUNT  # and the threads go on


def test_no_thread_is_left_after_closing() -> None:
    opened = ReplicaThreads(CPUS)
    opened.apply([int] * COUNT, Turns(COUNT))
    opened.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, lambda: np.random.rand()])
def test_generators_tell_that_something_drew(draw: Callable[[], Any]) -> None:
    before = generator_states(CPUS)
    assert generator_states(CPUS) == before
    draw()
    assert generator_states(CPUS) != before
