"""Replicas take their steps together, so all need the same number of them.

In training and evaluation, loaders of unequal lengths are refused. In ``trainer.predict`` Lightning deals out the
samples without repeating any, so a replica may have one batch less than another. It then repeats its last one, since
fully sharded replicas gather their layers together::

    replica 0    batch 0 | batch 1 | batch 2
    replica 1    batch 0 | batch 1 | batch 1 again, without an effect
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_parallel.ranks.collectives import gather_objects
from lightning_parallel.ranks.run import Run
from lightning_parallel.seeding import TorchGenerators, host_generators_kept
from lightning_parallel.tracing.snapshot import StateKept

T = TypeVar("T")


def refuse_unequal_steps(run: Run, kind: str, batches: Sequence[float]) -> None:
    """Refuse loaders that have more batches on one replica than on another, which would wait for it in vain. All
    replicas call it before their first step.

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
                f"they take their steps together. Leave use_distributed_sampler=True, give samplers equal lengths, or "
                f"set limit_{kind}_batches={min(known):.0f}."
            )


class EqualSteps:
    """The prediction steps of this replica. All replicas make one before they predict: the Trainer's loop knows by then
    how many batches each loader has.

    Raises:
        ValueError: on all ranks, if a replica has no batch of a loader of which others have some, or the step takes its
            batches itself.
    """

    def __init__(self, run: Run) -> None:
        if is_param_in_hook_signature(run.module.predict_step, "dataloader_iter", explicit=True):
            raise ValueError(
                "predict_step(dataloader_iter): fully sharded replicas have to take as many steps each, so they take "
                "predict_step(batch, batch_idx)."
            )
        self._module = run.module
        self._generators = TorchGenerators(run.device)
        own = [float(count) for count in run.trainer.predict_loop.max_batches]  # infinite where a loader doesn't know
        of_loaders = list(zip(*gather_objects(own, run.groups.along("data")), strict=True))
        for loader, counts in enumerate(of_loaders):
            if min(counts) == 0 < max(counts):
                raise ValueError(
                    f"Loader {loader} of trainer.predict has a batch for some of the fully sharded replicas and none "
                    f"for others, but they gather layers together. Use fewer replicas, or smaller batches."
                )
        # For each loader with batches: how many are left, and how many steps are missing then.
        self._loaders = [
            [count, max(counts) - count if math.isfinite(max(counts)) else 0.0]
            for count, counts in zip(own, of_loaders, strict=True)
            if count > 0
        ]

    def run(self, step: Callable[[], T]) -> T:
        """Run the step on a batch. On a loader's last batch, run it as often as other replicas still have batches."""
        output = step()
        self._loaders[0][0] -= 1
        if self._loaders[0][0] == 0:
            _, missing = self._loaders.pop(0)
            for _ in range(int(missing)):
                with StateKept(self._module), self._generators.kept(), host_generators_kept():
                    step()
        return output
