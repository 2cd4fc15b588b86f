"""Runs in processes of their own, a thread each, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from tools.study import train
from tools.study.arms import Arm, Run, Setting, wanted
from tools.study.store import Store
from tools.study.task import Task


def following(setting: Setting, plan: Sequence[Arm], seeds: int, store: Store, under_way: Sequence[Run]) -> Run | None:
    """The first run of the plan that can start now; None if there is nothing to do, or all waits for those under way.

    A later arm's runs start while an earlier one's rates are being decided.
    """
    for arm in plan:
        for run in wanted(setting, arm, seeds, store.losses):
            if run not in store.results and run not in under_way:
                return run
    return None


def perform(
    setting: Setting,
    plan: Sequence[Arm],
    seeds: int,
    store: Store,
    task: Task,
    *,
    jobs: int,
    until: float | None = None,
    done: Callable[[Run], None] = lambda _: None,
) -> None:
    """Run what is missing.

    Args:
        jobs: processes at a time.
        until: minutes after which no more runs start.
        done: called after each run.

    Raises:
        RuntimeError: a run's process died.
    """
    deadline = None if until is None else time.monotonic() + 60 * until
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes take it over
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.study.work"])  # imported once, not once a run
    under_way: dict[Run, tuple[BaseProcess, Connection]] = {}
    try:
        while True:
            while len(under_way) < jobs and (deadline is None or time.monotonic() < deadline):
                run = following(setting, plan, seeds, store, list(under_way))
                if run is None:
                    break
                receiver, sender = context.Pipe(duplex=False)
                worker = context.Process(target=_execute, args=(run, task, sender), daemon=True)
                worker.start()
                sender.close()  # so that the end of the process ends the pipe
                under_way[run] = (worker, receiver)
            if not under_way:
                return
            ready = wait([receiver for _, receiver in under_way.values()])
            for run, (process, receiver) in list(under_way.items()):
                if receiver not in ready:
                    continue
                try:
                    result = receiver.recv()
                except EOFError:
                    process.join()
                    raise RuntimeError(f"the process of {run} ended with exit code {process.exitcode}") from None
                del under_way[run]
                process.join()
                store.add(run, result)
                done(run)
    finally:
        for left, _ in under_way.values():
            left.terminate()
            left.join()


def _execute(run: Run, task: Task, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has the results
    torch.set_num_threads(1)
    begin = time.monotonic()
    result = train.execute(run, task)
    sender.send({**result, "seconds": round(time.monotonic() - begin, 1), "torch": torch.__version__})
