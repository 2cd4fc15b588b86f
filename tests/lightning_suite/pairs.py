"""Runs each of Lightning's tests in two processes at once, which are the ranks of every Trainer that it makes.

The tests were written for one process. So both ranks run the same test from its first line to its last, in the
environment that a cluster would give them, and share a folder for its files. It passes if it passes on both::

    this process    imports torch, Lightning and pytest once
        rank 0      forked: pytest test_x.py::test_y    trainer.fit: meets rank 1
        rank 1      forked: pytest test_x.py::test_y    trainer.fit: meets rank 0
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from tests.lightning_suite.plugin import SHARED

_RANKS = 2
_LIMIT = 60.0  # seconds for a test
_AFTER_THE_OTHER = 20.0  # seconds that a rank has when the other one has ended


def run_in_pairs(tests: list[str], root: Path, arguments: list[str], file: Path) -> None:
    """Run tests, one after the other, and append what each rank notes of each of them to a file.

    Args:
        tests: their names, below ``root``.
        arguments: further ones of pytest.
    """
    for test in tests:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            _run([*arguments, f"{root / test}"], folder)
            lines = [(folder / f"notes{rank}").read_text() for rank in range(_RANKS)]
        # A rank that has ended within the test has noted its set-up at most.
        ended = json.dumps([test, "failed", True, "Timeout, or an end of the process"]) + "\n"
        with file.open("a") as notes:
            notes.writelines(each if each.count("\n") > 1 else each + ended for each in lines)


def _run(arguments: list[str], folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, port, folder, arguments)) for rank in range(_RANKS)]
    for rank, process in enumerate(ranks):
        (folder / f"notes{rank}").touch()
        process.start()
    end = time.monotonic() + _LIMIT
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < end:
        alive[0].join(0.1)
        if len(alive) < _RANKS:
            end = min(end, time.monotonic() + _AFTER_THE_OTHER)
    for process in ranks:
        process.kill()
        process.join()


def _rank(rank: int, port: int, folder: Path, arguments: list[str]) -> None:
    os.environ |= {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{_RANKS}", "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", SHARED: f"{folder / 'files'}",
    }  # fmt: skip
    with (folder / f"output{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = pytest.main([*arguments, "--outcomes", str(folder / f"notes{rank}"), f"--basetemp={folder}/temp{rank}"])
    os._exit(int(code))  # whatever threads a test has left
