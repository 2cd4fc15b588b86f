"""The installed commands: ``lp-train`` is ``python -m recipes.train``, and so on.

::

    pip install "lightning-parallel[recipes]"
    lp-train strategy=pipeline_1f1b

Nothing is imported before it is known that the extra ``recipes`` is installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

from recipes.processes import import_from_here

_NEEDED = ("psutil", "rich", "yaml")  # by all commands; the others name what they miss


def train() -> None:
    _start("recipes.train")


def compare() -> None:
    _start("recipes.compare.__main__", "command")


def evaluate() -> None:
    _start("recipes.evaluate")


def generate() -> None:
    _start("recipes.generate")


def export() -> None:
    _start("recipes.export")


def convert() -> None:
    _start("recipes.convert")


def report() -> None:
    _start("recipes.report")


def rerun() -> None:
    _start("recipes.rerun")


def _start(module: str, function: str = "main") -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f'{", ".join(missing)} not installed: pip install "lightning-parallel[recipes]"')
    import_from_here()
    getattr(import_module(module), function)()
