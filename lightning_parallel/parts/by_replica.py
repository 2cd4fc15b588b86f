"""What each rank has for a checkpoint that rank 0 writes, gathered there, and put in the order of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.collectives import gather_objects_on_first


def replicas_and_own(trainer: pl.Trainer) -> tuple[int, int]:
    """How many replicas there are, and which one this rank belongs to."""
    sampler = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return sampler["num_replicas"], sampler["rank"]


def gathered(mine: Any, trainer: pl.Trainer, has_failed: bool) -> list[Any]:
    """What every rank has, by rank; on rank 0 only.

    Args:
        mine: of this rank.
        trainer: of the run.
        has_failed: the run ends with an error, so others may have left. Nothing is gathered: the list has this rank's.
    """
    if trainer.world_size == 1 or has_failed:
        return [mine]
    return gather_objects_on_first(mine, None) or []


def warn_of_absent(trainer: pl.Trainer, has_failed: bool) -> None:
    """A checkpoint has nothing of the other ranks."""
    if has_failed and trainer.world_size > 1:
        rank_zero_warn(
            "Saved after an error, when other ranks may have left: the checkpoint has the random states, the place in "
            "the data and the sums over the epoch of rank 0 only. A run that is resumed from it is not the same."
        )


def by_replica(ranks: Sequence[tuple[int, Any, dict[str, Any]]]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Of each replica the loaders' states, those of its first rank, and the sums that any of its ranks has.

    Args:
        ranks: for each rank its replica, loaders' states and sums; empty where they aren't gathered.
    """
    loaders: dict[int, Any] = {}
    sums: dict[int, dict[str, Any]] = {}
    for replica, states, own in ranks:
        loaders.setdefault(replica, states)
        sums.setdefault(replica, {}).update(own)  # of a pipeline's stages the last one logs
    return [loaders[replica] for replica in sorted(loaders)], [sums[replica] for replica in sorted(sums)]
