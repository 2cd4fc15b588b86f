"""What all tests share: the pool of worker processes, and the `gpu` marker."""

from __future__ import annotations

import os

# Before torch is imported, here and in the workers.
os.environ["OMP_NUM_THREADS"] = "1"
# Without this, a process that has asked for GPUs cannot fork workers that use them.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# torch's TCPStore asks the name server for the name of 127.0.0.1: a lost packet costs 1 s then, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pool import WorkerPool

torch.set_num_threads(1)

NOT_RUN = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """The session's worker processes: see tests/pool.py. They start with the first call. A session is one of those
    that pytest-xdist runs side by side."""
    workers = WorkerPool()
    yield workers
    workers.shutdown()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, take out the tests marked `gpu`, and count them for the summary."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    config.stash[NOT_RUN] = len(gpu)
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this one, if pytest-xdist runs several sessions: all collect the same tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = session.config.stash.get(NOT_RUN, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    said = getattr(node, "workeroutput", {}).get("not_run", 0)  # nothing, if it crashed
    node.config.stash[NOT_RUN] = max(node.config.stash.get(NOT_RUN, 0), said)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what this run did not show."""
    count = config.stash.get(NOT_RUN, 0)
    if count:
        terminalreporter.write_line(f"{count} gpu tests not run: no GPU on this machine")
