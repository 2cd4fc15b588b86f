"""Importing this module lets packages that import ``pytorch_lightning`` get ``lightning.pytorch``.

Both packages hold the same code. But their classes are different ones, so the Trainer of one takes no module and no
strategy of the other. Import this first::

    import lightning_parallel.as_pytorch_lightning  # before the packages that use pytorch_lightning
    from neuralforecast.models import NHITS

From then on ``pytorch_lightning.X`` is ``lightning.pytorch.X``, and ``lightning_fabric.X`` is ``lightning.fabric.X``,
everywhere in this process. ``pl.Trainer(strategy="pipeline_1f1b")`` works, too.

Raises:
    ImportError: ``pytorch_lightning`` or ``lightning_fabric`` was imported before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_STANDS_FOR = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _Alias(MetaPathFinder, Loader):
    """Gives the module of ``lightning`` under the other package's name, and loads no second copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, dot, rest = fullname.partition(".")
        if first not in _STANDS_FOR:
            return None
        name = f"{_STANDS_FOR[first]}{dot}{rest}"
        return ModuleSpec(fullname, self, loader_state=name) if find_spec(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # its own, which the import has replaced


for _name in _STANDS_FOR:
    if _name in sys.modules:
        raise ImportError(
            f"{_name} is imported already, so it can't be replaced. Put `import {__name__}` before the imports of all "
            f"packages that use it."
        )
sys.meta_path.insert(0, _Alias())
