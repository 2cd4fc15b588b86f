"""A study small enough for tests: its sizes, a text, and made-up results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from recipes.data.sources import stdlib
from tools.study.arms import Setting
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
