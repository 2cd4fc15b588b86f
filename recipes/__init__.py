"""Runs composed with Hydra from conf/: training, comparison, and the example models and data they use.

They run from the checkout, and as installed commands (:mod:`recipes.installed`). The library they show is
:mod:`lightning_parallel`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the checkout; where it is installed, the folder of all packages
CONF = (Path(__file__).resolve().parent / "conf").resolve()  # a link in the checkout, a folder in the wheel
IN_CHECKOUT = CONF.parent == ROOT
