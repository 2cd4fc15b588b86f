"""Warns of modules of ``pytorch_lightning``: no Trainer takes them together with a strategy of this package."""

from __future__ import annotations

import sys

from lightning_utilities.core.rank_zero import rank_zero_warn


def warn_of_other_modules() -> None:
    """Warn if a subclass of ``pytorch_lightning.LightningModule`` has been defined. Lightning refuses it together with
    a strategy of this package, and its message names neither the cause nor a fix."""
    other = getattr(sys.modules.get("pytorch_lightning"), "LightningModule", None)
    kinds = other.__subclasses__() if other is not None and other.__module__.startswith("pytorch_lightning") else []
    own = [kind for kind in kinds if not kind.__module__.startswith("pytorch_lightning")]
    if own:
        rank_zero_warn(
            f"{own[0].__module__}.{own[0].__qualname__} is a LightningModule of pytorch_lightning. The strategies of "
            f"lightning_parallel belong to lightning.pytorch, whose classes are others. To train it with them, put "
            f"`import lightning_parallel.as_pytorch_lightning` before all imports of pytorch_lightning."
        )
