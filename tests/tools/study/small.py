"""A study small enough for tests: its sizes, a text, and made-up results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from recipes.data.sources import stdlib
from tools.study.arms import Arm, Run, Setting, wanted
from tools.study.store import Store
from tools.study.text import Text

TINY = Setting("none", layers=4, width=8, heads=2, context=8, batch=8, updates=6, warmup=2, every=3, windows=5)


def write_text(folder: Path) -> Text:
    """A small text, written in the form of recipes.data.sources."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for split, length in (("train", 600), ("val", 200), ("test", 200)):
        random.integers(97, 105, length, dtype=np.uint8).tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps({"content": "of the tests"}))
    return Text(stdlib, "the tests", made=folder)


def fill(store: Store, setting: Setting, plan: Iterable[Arm], seeds: int, final: Callable[[Run], float | None]) -> None:
    """Results for all that the plan wants; None: it diverged."""
    for arm in plan:
        while missing := [run for run in wanted(setting, arm, seeds, store.losses) if run not in store.results]:
            loss = final(missing[0])
            curve = [[3, 2 * loss], [6, loss]] if loss is not None else []
            result = {"curve": curve, "final": loss, "choice": loss}
            store.add(missing[0], {**result, "final_read": loss, "seconds": 1.0, "torch": "2.13"})
