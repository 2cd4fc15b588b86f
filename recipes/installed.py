"""The installed commands: ``lp-train`` is ``python -m recipes.train``, and so on. Nothing is imported before the extra
``recipes`` is known to be there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from recipes.processes import import_from_here

_NEEDED = ("hydra", "psutil", "yaml")  # by all commands; the others name what they miss


def main() -> None:
    """The command of the name by which this program was started."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f'{", ".join(missing)} not installed: pip install ".[recipes]" in the checkout')
    import_from_here()
    name = Path(sys.argv[0]).stem.removeprefix("lp-")
    import_module("recipes.compare.__main__" if name == "compare" else f"recipes.{name}").main()
