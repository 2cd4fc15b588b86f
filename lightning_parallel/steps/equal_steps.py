"""Replicas take their steps together, so loaders of unequal lengths are refused: one would wait for another in vain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_parallel.ranks.collectives import gather_objects
from lightning_parallel.ranks.run import Run


def refuse_unequal_steps(run: Run, kind: str, batches: Sequence[float]) -> None:
    """Refuse loaders that have more batches on one replica than on another. All replicas call it before their first
    step.

    Args:
        kind: as in ``limit_{kind}_batches``.
        batches: for each loader their number, infinite where it isn't known.

    Raises:
        ValueError: on all replicas.
    """
    for loader, counts in enumerate(zip(*gather_objects([*batches], run.groups.along("data")), strict=True)):
        known = {count for count in counts if math.isfinite(count)}
        if len(known) > 1:
            raise ValueError(
                f"Of loader {loader} one replica has {min(known):.0f} batches, and another one {max(known):.0f}, but "
                f"they take their steps together. Leave use_distributed_sampler=True, give samplers equal lengths, "
                f"take another batch size, or set limit_{kind}_batches={min(known):.0f}."
            )
