"""What all tests share: the markers of what isn't always run. Fixtures are in fixtures.py."""

from __future__ import annotations

import tools.workers.environment  # noqa: F401  before torch

# isort: split
import gc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest

# Where nothing compiled is kept, each session takes three seconds to rewrite the asserts of all files.
sys.dont_write_bytecode = False

LONGEST = "strategies/test_contract.py"
NOT_RUN = pytest.StashKey[dict[str, int]]()  # the number of tests, by reason


def pytest_collection(session: pytest.Session) -> None:
    """The process from which pytest-xdist hands out tests collects none, and is spared six seconds of imports."""
    gc.disable()  # until all is imported
    session.config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_finish() -> None:
    """What is imported stays, so collections of garbage need not look at it: each would take a fifth of a second."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run the tests marked `thorough`, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what this run leaves out, and count it for the summary: tests marked `gpu` where there are too few,
    those marked `timm` where there is none, and those marked `programs` or `thorough` if they aren't asked for."""
    import torch  # of all processes but the one that hands out tests

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
