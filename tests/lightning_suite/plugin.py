"""A pytest plugin that runs Lightning's own tests with another default strategy, and notes how each of them ends.

``pytest -p tests.lightning_suite.plugin --layout pipeline --outcomes FILE``. The strategy takes the place of
Lightning's default wherever a test makes a Trainer for one process and names none.
"""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import Strategy

import lightning_parallel as lp

LAYOUTS: dict[str, Callable[[], Strategy] | None] = {
    "single": None,
    "pipeline": lp.PipelineStrategy,
    "tensor": lp.TensorParallelStrategy,
    "fully_sharded": lp.FullyShardedStrategy,
    "data_parallel": lp.DataParallelStrategy,
}
_TAKES_PART = pytest.StashKey[bool]()  # by test: was a Trainer made for the layout?
_HERE = Path(lp.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layout", choices=list(LAYOUTS), default="single")
    parser.addoption("--outcomes", type=Path, required=True, help="a file that gets a line of JSON for each report")
    parser.addoption("--among", type=Path, help="a file with the names of the tests that may run")
    parser.addoption("--without", type=Path, help="a file with the names of others")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cloud: of Lightning's")
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = [config.getoption(name) for name in ("among", "without")]
    among, without = (None if file is None else {*file.read_text().splitlines()} for file in files)
    items[:] = [
        item for item in items if (among is None or item.nodeid in among) and item.nodeid not in (without or ())
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    make, init = LAYOUTS[item.config.getoption("layout")], pl.Trainer.__init__
    item.stash[_TAKES_PART] = False

    @functools.wraps(init)
    def replaced(self: pl.Trainer, *args: Any, **settings: Any) -> None:
        alone = settings.get("devices", 1) in ("auto", 1, "1") and settings.get("num_nodes", 1) == 1
        on_cpu = settings.get("accelerator", "auto") in ("auto", "cpu")
        if alone and on_cpu and settings.get("strategy", "auto") == "auto":
            item.stash[_TAKES_PART] = True
            settings |= {} if make is None else {"strategy": make(), "accelerator": "cpu", "devices": 1}
        init(self, *args, **settings)

    pl.Trainer.__init__ = replaced  # type: ignore[method-assign]
    try:
        return (yield)
    finally:
        pl.Trainer.__init__ = init  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    cause = "" if call.excinfo is None else _cause(call.excinfo.value)
    report.user_properties.append(("outcome", (item.stash[_TAKES_PART], cause)))
    return report


class _Writer:
    """In the process that gets the reports of all workers."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        takes_part, cause = dict(report.user_properties)["outcome"]  # type: ignore[misc]
        with self._file.open("a") as file:
            print(json.dumps([report.nodeid, report.outcome, takes_part, cause]), file=file)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Writer(session.config.getoption("outcomes")))


def _cause(error: BaseException) -> str:
    """The error's class and first line, and the function of the library that it passed last."""
    passed = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in passed if Path(frame.filename).is_relative_to(_HERE)]
    where = f" [{Path(frames[-1].filename).relative_to(_HERE)} {frames[-1].name}]" if frames else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}{where}"
