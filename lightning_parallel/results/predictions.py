"""Makes ``trainer.predict`` return on every rank what one process would.

Predictions are made on the last stage, by each replica for its share of the samples. Lightning deals the samples out in
turn, so the k-th batches of all replicas hold the samples of as many batches of one process::

    replica 0    0 2 4 | 6 8 10 | ...            one process    0 1 2 | 3 4 5 | 6 7 8 | ...
    replica 1    1 3 5 | 7 9 11 | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_parallel.batch import members, rebuild
from lightning_parallel.private.lightning.data import samples_predicted
from lightning_parallel.ranks.collectives import broadcast_object, gather_objects
from lightning_parallel.ranks.run import Run


class _NotBySampleError(ValueError):
    """A prediction can't be taken apart by samples."""


@dataclass(frozen=True)
class _Share:
    """One replica's predictions for the samples of one loader.

    Attributes:
        samples: the number of samples of each batch.
        batch_size: the loader's; None if the replicas haven't divided the samples among them.
    """

    predictions: list[Any]
    samples: list[int]
    batch_size: int | None


def share_predictions(run: Run) -> None:
    """Replace the lists that ``trainer.predict`` is about to return. All ranks call it."""
    trainer, layout, groups = run.trainer, run.layout, run.groups
    loop = trainer.predict_loop
    if not loop.return_predictions:
        return
    of_loaders = loop.predictions if loop.num_dataloaders > 1 else [loop.predictions]
    maker = layout.rank_at(pipeline=layout.stages - 1, tensor=0)
    everything: list[list[Any]] | None = None
    if layout.rank == maker:
        shares = [_Share(own, *dealt) for own, dealt in zip(of_loaders, samples_predicted(trainer), strict=True)]
        replicas = gather_objects(shares, groups.along("data"))
        limit = trainer.limit_predict_batches if isinstance(trainer.limit_predict_batches, int) else None
        everything = [_of_one_process(of_replicas)[:limit] for of_replicas in zip(*replicas, strict=True)]
    everything = broadcast_object(everything, maker, groups.model)
    for own, whole in zip(of_loaders, everything, strict=True):
        own[:] = whole


def _of_one_process(replicas: Sequence[_Share]) -> list[Any]:
    """The predictions for one loader, as one process would return them."""
    if len(replicas) == 1:
        return replicas[0].predictions
    longest = max(len(share.predictions) for share in replicas)
    present = [[share for share in replicas if k < len(share.predictions)] for k in range(longest)]
    rounds = [[share.predictions[k] for share in shares] for k, shares in enumerate(present)]
    size = replicas[0].batch_size
    try:
        if size is None:
            raise _NotBySampleError
        counts = [[share.samples[k] for share in shares] for k, shares in enumerate(present)]
        regrouped: list[Any] = []
        for parts, each in zip(rounds, counts, strict=True):
            order = sorted((row, part) for part, count in enumerate(each) for row in range(count))
            regrouped += [_rows(parts, each, order[start : start + size]) for start in range(0, len(order), size)]
        return regrouped
    except _NotBySampleError:
        rank_zero_warn(
            "share_predictions=True: predict_step returned something that hasn't a row of one shape, or an item of a "
            "list, for each sample, or Lightning hasn't divided the samples of its loader over the replicas. What all "
            "replicas returned for a batch is listed in turn, so it isn't what one process would return."
        )
        return [prediction for parts in rounds for prediction in parts]


def _rows(parts: Sequence[Any], counts: Sequence[int], places: Sequence[tuple[int, int]]) -> Any:
    """A prediction made of certain rows of others, which all have the same structure.

    Args:
        counts: the number of samples of each part.
        places: for each sample that is wanted, its row and its part.

    Raises:
        _NotBySampleError: something in the predictions hasn't one row, or one item, for each sample, or it can't be
            told which.
    """
    if all(part is None for part in parts):
        return None
    if all(isinstance(part, Tensor) for part in parts):
        shapes = {(part.shape[1:], part.dtype) for part in parts if part.dim()}
        if any(not part.dim() or len(part) != n for part, n in zip(parts, counts, strict=True)) or len(shapes) > 1:
            raise _NotBySampleError
        return torch.stack([parts[part][row] for row, part in places])
    found = []
    # A list with an item for each sample (a text, the boxes of an image), or a tuple of texts.
    texts = all(isinstance(part, tuple) and all(isinstance(item, str) for item in part) for part in parts)
    lists = texts or all(isinstance(part, list) for part in parts)
    if lists and all(len(part) == n for part, n in zip(parts, counts, strict=True)):
        found.append(type(parts[0])(parts[part][row] for row, part in places))
    with suppress(_NotBySampleError):
        found.append(_rows_of_members(parts, counts, places))
    if len(found) != 1:  # if it is both: as many tensors as samples, each with as many rows
        raise _NotBySampleError
    return found[0]


def _rows_of_members(parts: Sequence[Any], counts: Sequence[int], places: Sequence[tuple[int, int]]) -> Any:
    structures = [structure for structure in map(members, parts) if structure is not None]
    keys = [list(names) for names, _ in structures]
    values = [of_part for _, of_part in structures]
    alike = all(type(part) is type(parts[0]) for part in parts) and all(each == keys[0] for each in keys)
    if not keys or not keys[0] or not alike:
        raise _NotBySampleError
    return rebuild(parts[0], keys[0], [_rows(row, counts, places) for row in zip(*values, strict=True)])
