"""Checks a module with a fault, inside a worker of the pool, and judges the report."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lightning_parallel import check
from lightning_parallel.comparison.check import Comparison
from tools.faults.faults import FAULTS
from tools.faults.models import LAYOUTS, MODELS
from tools.faults.seeding import layouts_only
from tools.workers.pool import WorkerError, WorkerPool

PATIENCE = 120.0  # seconds for a case
PAIRS = [*dict.fromkeys((fault.model, fault.layout) for fault in FAULTS.values())]


@dataclass(frozen=True)
class Case:
    """A fault's report, or that of a module under a layout without any.

    Attributes:
        name: the fault's; None without any.
        report: the error's last lines if there is none.
        comparison: None if it ended in an error.
    """

    name: str | None
    model: str
    layout: str
    report: str
    comparison: Comparison | None
    seconds: float

    @property
    def is_found(self) -> bool:
        """Does the report say that something is wrong with the layout?"""
        found = self.comparison
        return found is not None and not found.equal and not found.by_nature

    @property
    def is_placed(self) -> bool:
        """Does it say where?"""
        begins = None if self.comparison is None else self.comparison.beginning
        if self.name is None or begins is None or not self.is_found:
            return False
        fault = FAULTS[self.name]
        return fnmatchcase(begins.unit, fault.unit) and fault.phase == begins.phase

    @property
    def is_right(self) -> bool:
        """Is a fault found and placed, or is there no alarm without one?"""
        if self.name is None:
            return self.comparison is not None and not self.is_found
        return self.is_placed


def case(pool: WorkerPool, model: str, layout: str, name: str | None = None) -> Case:
    """Run a case on its ranks."""
    begin = time.monotonic()
    comparison = None
    try:
        comparison, *_ = pool.run(checked, LAYOUTS[layout][0], model, layout, name, init=False, timeout=PATIENCE)
        report = str(comparison)
    except WorkerError as error:
        report = str(error)[-2000:]
    return Case(name, model, layout, report, comparison, time.monotonic() - begin)


def case_of(pool: WorkerPool, name: str) -> Case:
    """Run a fault's case."""
    return case(pool, FAULTS[name].model, FAULTS[name].layout, name)


def checked(model: str, layout: str, name: str | None = None) -> Comparison | None:
    """On a rank: the comparison of a module under a layout, with a fault in it or without any."""
    warnings.simplefilter("ignore")
    kind, (devices, strategy, options) = MODELS[model], LAYOUTS[layout]
    with layouts_only(), nullcontext() if name is None else FAULTS[name].seeded():
        return check(kind(), kind.batches(), strategy=strategy, devices=devices, accelerator="cpu", **options)
