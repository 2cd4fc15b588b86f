"""Gathers what each rank has for a checkpoint that rank 0 writes, and sorts it by replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.collectives import gather_objects_on_first


def replicas_and_own(trainer: pl.Trainer) -> tuple[int, int]:
    """The number of replicas, and the one that this rank belongs to."""
    sampler = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return sampler["num_replicas"], sampler["rank"]


def gathered(mine: Any, trainer: pl.Trainer, has_failed: bool) -> list[Any]:
    """What every rank passes, by rank; on rank 0 only. If the run ``has_failed``, others may have left: nothing is
    gathered, and the list holds this rank's alone."""
    if trainer.world_size == 1 or has_failed:
        return [mine]
    return gather_objects_on_first(mine, None) or []


def warn_of_absent(trainer: pl.Trainer, has_failed: bool) -> None:
    """Warn that a checkpoint holds nothing of the other ranks."""
    if has_failed and trainer.world_size > 1:
        rank_zero_warn(
            "Saved after an error, when other ranks may have left: the checkpoint has the random states, the place in "
            "the data and the sums over the epoch of rank 0 only. A run that is resumed from it is not the same."
        )


def by_replica(ranks: Sequence[tuple[int, Any, dict[str, Any]]]) -> tuple[list[Any], list[dict[str, Any]]]:
    """The states of each replica's loaders, from its first rank, and its sums, from any of its ranks. ``ranks`` are,
    for each rank, its replica, loaders' states and sums; both are empty where they weren't gathered."""
    loaders: dict[int, Any] = {}
    sums: dict[int, dict[str, Any]] = {}
    for replica, states, own in ranks:
        loaders.setdefault(replica, states)
        sums.setdefault(replica, {}).update(own)  # of a pipeline's stages the last one logs
    return [loaders[replica] for replica in sorted(loaders)], [sums[replica] for replica in sorted(sums)]
