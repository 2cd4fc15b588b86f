"""What all tests share: the pool of workers, double precision, and the markers of what isn't always run."""

from __future__ import annotations

import tools.workers.environment  # before torch

# isort: split
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tools.workers.torchvision_ops  # noqa: F401  before Lightning, which imports torchvision where it is installed
from lightning_parallel.ranks import process_group
from tools.workers.pool import WorkerPool

torch.set_num_threads(1)
# Where nothing compiled is kept, each session takes three seconds to rewrite the asserts of all files.
sys.dont_write_bytecode = False

LONGEST = "strategies/test_contract.py"
NOT_RUN = pytest.StashKey[dict[str, int]]()  # the number of tests, by reason


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """The session's worker processes: see tools/workers/pool.py. They start with the first call. A session is one of
    those that pytest-xdist runs side by side."""
    workers = WorkerPool()
    yield workers
    workers.shutdown()


@pytest.fixture(autouse=True, scope="module")
def _left_as_found() -> Iterator[None]:
    """What a file's tests set, and the group that their Trainers join, is not for the next file of this process. A
    Trainer that ends before its tear-down leaves WORLD_SIZE behind, for one."""
    environment = dict(os.environ)
    yield
    torch.set_default_dtype(torch.float32)
    process_group.close()
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def in_double_precision() -> Iterator[None]:
    """Seeded, and float64 by default."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run the tests marked `thorough`, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what this run leaves out, and count it for the summary: tests marked `gpu` where there are too few,
    those marked `timm` where there is none, and those marked `programs` or `thorough` if they aren't asked for."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    without_timm, not_thorough = importlib.util.find_spec("timm") is None, not config.getoption("thorough")
    no_programs = not_thorough and "programs" not in config.getoption("markexpr")
    too_few = f"{gpus or 'no'} GPU{'s' * (gpus > 1)} on this machine"
    left_out: dict[str, Callable[[pytest.Item], bool]] = {
        f"gpu tests not run: {too_few}": lambda item: _gpus_needed(item) > gpus,
        "tests of timm not run: `make timm-tests` runs them": lambda item: without_timm and _is_marked(item, "timm"),
        "programs not run: `make programs` runs them": lambda item: no_programs and _is_marked(item, "programs"),
        "thorough tests not run: `make thorough` runs them": lambda item: not_thorough and _is_marked(item, "thorough"),
    }
    counts = config.stash.setdefault(NOT_RUN, {})
    for reason, lacks in left_out.items():
        marked = [item for item in items if lacks(item)]
        counts[reason] = len(marked)
        if marked:
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if not lacks(item)]
    # The longest begins first, so that it isn't left alone at the end.
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))


def _is_marked(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def _gpus_needed(item: pytest.Item) -> int:
    marker = item.get_closest_marker("gpu")
    return 0 if marker is None else next(iter(marker.args), 1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that started this one, if pytest-xdist runs several sessions: all collect the same tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = session.config.stash.get(NOT_RUN, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(NOT_RUN, {}).update(getattr(node, "workeroutput", {}).get("not_run", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what this run did not show."""
    for reason, count in config.stash.get(NOT_RUN, {}).items():
        if count:
            terminalreporter.write_line(f"{count} {reason}")
