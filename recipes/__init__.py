"""Runs composed with Hydra from conf/: training, comparison, and the example models and data they use.

The recipes run from the checkout and are not part of the wheel; the library they show is
:mod:`lightning_parallel`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the checkout
