"""Runs each of Lightning's tests in two processes at once, which are the ranks of every Trainer that it makes.

The tests were written for one process. So both ranks run the same test from its first line to its last, in the
environment that a cluster would give them, and share a folder for its files. It passes if it passes on both::

    this process    imports torch, Lightning and the tests once
        rank 0      forked: test_x.py::test_y    trainer.fit: meets rank 1
        rank 1      forked: test_x.py::test_y    trainer.fit: meets rank 0

Ranks mostly wait for each other, so several pairs run at once. A test that takes too long then runs again, alone.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = "LIGHTNING_SUITE_FILES"  # an environment variable: the folder of a test's files, of both ranks
_RANKS = 2
_LIMIT = 60.0  # seconds for a test
_AFTER_THE_OTHER = 10.0  # seconds that a rank has when the other one has ended


def run_in_pairs(items: list[pytest.Item], file: Path, pairs: int) -> None:
    """Run tests, and append what each rank notes of each of them to a file.

    Args:
        pairs: how many tests run at once.
    """
    gc.freeze()  # or each rank would look through the objects of all imports
    late = [pair.item for pair in _run(items, pairs) if not pair.note(file, even_if_late=pairs == 1)]
    for pair in _run(late, 1):
        pair.note(file, even_if_late=True)


def _run(items: list[pytest.Item], pairs: int) -> Iterator[_Pair]:
    """Start tests, ``pairs`` of them at once, and yield each when it has ended."""
    waiting, running = items[::-1], list[_Pair]()
    while waiting or running:
        while waiting and len(running) < pairs:
            running.append(_Pair(waiting.pop()))
        time.sleep(0.02)
        ended = [pair for pair in running if pair.has_ended()]
        running = [pair for pair in running if pair not in ended]
        yield from ended


class _Pair:
    """Two ranks that run a test."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item
        self._scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._notes = [Path(self._scratch.name) / f"notes{rank}" for rank in range(_RANKS)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        self._ranks = [fork.Process(target=self._run, args=(rank, port)) for rank in range(_RANKS)]
        for notes, process in zip(self._notes, self._ranks, strict=True):
            notes.touch()
            process.start()
        self._end = time.monotonic() + _LIMIT

    def has_ended(self) -> bool:
        """Have both ranks ended, or had their time?"""
        alive = sum(process.is_alive() for process in self._ranks)
        if 0 < alive < _RANKS:
            self._end = min(self._end, time.monotonic() + _AFTER_THE_OTHER)
        return not alive or time.monotonic() >= self._end

    def note(self, file: Path, even_if_late: bool) -> bool:
        """End the ranks, and append their notes to ``file``. If one was still running, it is a timeout with
        ``even_if_late``. Otherwise nothing is noted, and False is returned."""
        late = any(process.is_alive() for process in self._ranks)
        for process in self._ranks:
            process.kill()
            process.join()
        # The rank that ended first knows the cause, the other one at most that it was left alone.
        lines = [notes.read_text() for notes in sorted(self._notes, key=lambda notes: notes.stat().st_mtime)]
        self._scratch.cleanup()
        if late and not even_if_late:
            return False
        # A rank that has ended within the test has noted its set-up at most.
        ended = json.dumps([self.item.nodeid, "failed", True, "Timeout, or an end of the process"]) + "\n"
        with file.open("a") as notes:
            notes.writelines([*lines, *(ended for each in lines if each.count("\n") <= 1)])
        return True

    def _run(self, rank: int, port: int) -> None:
        temporary = Path(self._scratch.name) / f"temp{rank}"
        temporary.mkdir()
        os.environ |= {
            "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{_RANKS}", "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "PYTEST_DEBUG_TEMPROOT": f"{temporary}",
            SHARED: f"{self._scratch.name}/files",
        }  # fmt: skip
        with (temporary / "output").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.argv[1:] = ["--version"]  # of pytest: a test may launch further ranks, which would run all tests again
        self.item.config.option.outcomes = self._notes[rank]
        self.item.ihook.pytest_runtest_protocol(item=self.item, nextitem=None)
        os._exit(0)  # whatever threads a test has left
