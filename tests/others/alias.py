"""Lets ``import pytorch_lightning`` give ``lightning.pytorch``, since a Trainer of one takes no module of the other.

`install` has to be called before anything imports pytorch_lightning.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _Alias(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        first, _, rest = name.partition(".")
        if first not in ALIASES:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=f"{ALIASES[first]}.{rest}".rstrip("."))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__  # which the import puts in its place
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Install the finder, if it isn't there."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias())
