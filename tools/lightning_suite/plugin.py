"""A pytest plugin that runs Lightning's own tests with another default strategy, and notes how each of them ends.

``pytest -p tools.lightning_suite.plugin --layout pipeline --outcomes FILE``. The strategy takes the place of
Lightning's default wherever a test makes a Trainer for one process and names none. Layouts of two ranks need two
processes (``pairs.py``), each with such a Trainer.
"""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy, Strategy

import lightning_parallel as lp
from tools.lightning_suite.pairs import SHARED, run_in_pairs


@dataclass(frozen=True)
class Layout:
    """A strategy in the place of the default.

    Attributes:
        make: makes it; None leaves Lightning's default.
        ranks: processes for each test.
        beside: the layout in which a test has to pass to count.
    """

    make: Callable[[], Strategy] | None
    ranks: int = 1
    beside: str = "single"


LAYOUTS = {
    "single": Layout(None),
    "pipeline": Layout(lp.PipelineStrategy),
    "tensor": Layout(lp.TensorParallelStrategy),
    "fully_sharded": Layout(lp.FullyShardedStrategy),
    "data_parallel": Layout(lp.DataParallelStrategy),
    "ddp x 2": Layout(DDPStrategy, 2),  # Lightning's own
    "pipeline x 2": Layout(partial(lp.PipelineStrategy, stages=1, data_parallel=2), 2, "ddp x 2"),
    "tensor x 2": Layout(partial(lp.TensorParallelStrategy, tensor_parallel=2, plan="none"), 2, "ddp x 2"),
    "fully_sharded x 2": Layout(lp.FullyShardedStrategy, 2, "ddp x 2"),
}
_TAKES_PART = pytest.StashKey[bool]()  # by test: was a Trainer made for the layout?
_HERE = Path(lp.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layout", choices=list(LAYOUTS), default="single")
    parser.addoption("--outcomes", type=Path, required=True, help="a file that gets a line of JSON for each report")
    parser.addoption("--among", type=Path, help="a file with the names of the tests that may run")
    parser.addoption("--without", type=Path, help="a file with the names of others")
    parser.addoption("--pairs", type=int, default=1, help="tests at once, where a layout has two ranks")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cloud: of Lightning's")
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = [config.getoption(name) for name in ("among", "without")]
    among, without = (None if file is None else {*file.read_text().splitlines()} for file in files)
    items[:] = [
        item for item in items if (among is None or item.nodeid in among) and item.nodeid not in (without or ())
    ]


@pytest.hookimpl
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if LAYOUTS[session.config.getoption("layout")].ranks == 1:
        return None  # pytest's own loop
    run_in_pairs(session.items, session.config.getoption("outcomes"), session.config.getoption("pairs"))
    return True


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """The folder that the ranks share, or pytest's own."""
    shared = Path(os.environ.get(SHARED, tmp_path))
    shared.mkdir(exist_ok=True)
    return shared


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    layout, init = LAYOUTS[item.config.getoption("layout")], pl.Trainer.__init__
    item.stash[_TAKES_PART] = False

    @functools.wraps(init)
    def replaced(self: pl.Trainer, *args: Any, **settings: Any) -> None:
        alone = settings.get("devices", 1) in ("auto", 1, "1") and settings.get("num_nodes", 1) == 1
        on_cpu = settings.get("accelerator", "auto") in ("auto", "cpu")
        if alone and on_cpu and settings.get("strategy", "auto") == "auto":
            item.stash[_TAKES_PART] = True
            if layout.make is not None:
                settings |= {"strategy": layout.make(), "accelerator": "cpu", "devices": layout.ranks}
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

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        takes_part, cause = properties["outcome"]
        with self._config.getoption("outcomes").open("a") as file:
            print(json.dumps([report.nodeid, report.outcome, takes_part, cause]), file=file)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Writer(session.config))


def _cause(error: BaseException) -> str:
    """The error's class and first lines, and the function of the library that it passed last."""
    passed = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in passed if Path(frame.filename).is_relative_to(_HERE)]
    where = f" [{Path(frames[-1].filename).relative_to(_HERE)} {frames[-1].name}]" if frames else ""
    first = " ".join(
        line.strip() for line in str(error).strip().splitlines()[:3]
    )  # pytest.raises has what it got there
    return f"{type(error).__name__}: {first[:240]}{where}"
