"""Splits batches into microbatches, as the settings say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.batch import batch_size, samples_of, sizes, split_into
from lightning_parallel.set_up.options import StagedOptions

WAYS_TO_SPLIT = (
    "Give the strategy split=, a function of a batch and a number that returns at most so many batches; or use "
    "microbatches=1"
)

# Samples: enough for any number of microbatches, which divides it evenly.
_MANY = math.lcm(*range(1, 129))


class Splitting:
    """Splits each batch of a run.

    Args:
        automatic: gives the number of microbatches for ``microbatches="auto"``, from the number of a batch's samples.

    Attributes:
        by_user: the user's function ``split=`` splits.
        counts_samples: are the sizes of the parts that were made last numbers of samples? Otherwise they are guesses.
    """

    def __init__(self, options: StagedOptions, automatic: Callable[[int], int]) -> None:
        self.by_user = options.split is not None
        self.counts_samples = True
        self._options, self._automatic = options, automatic
        self._is_first_batch = True
        self._whole = options.microbatches == 1

    def parts(self, batch: Any) -> tuple[list[Any], list[int]]:
        """The microbatches of a batch, and their sizes in samples. A part whose size isn't known counts as
        Lightning counts it, or as 1.

        Raises:
            ValueError: the batch can't be split as the settings want it.
        """
        first, self._is_first_batch = self._is_first_batch, False
        wanted = self._options.microbatches
        if self._options.split is not None:
            count = self._automatic(_MANY) if wanted == "auto" else wanted
            parts = [*self._options.split(batch, count)]
            if not 0 < len(parts) <= count:
                raise ValueError(
                    f"split= returned {len(parts)} parts of a batch for {count} microbatches: it has to return at "
                    f"least one, and at most so many."
                )
            known = [samples_of(part) for part in parts]
            self.counts_samples = None not in known
            return parts, [size or _guess(part) for size, part in zip(known, parts, strict=True)]
        if not self._whole:
            try:
                size = batch_size(batch)
            except ValueError as error:
                problem = f"microbatches={wanted!r}: {error} {WAYS_TO_SPLIT}."
                if wanted != "auto" or not first:
                    raise ValueError(problem) from None
                self._whole = True
                rank_zero_warn(f"{problem} Until then each batch is one microbatch, for which stages wait.")
        if self._whole:
            return [batch], [samples_of(batch) or _guess(batch)]
        count = self._automatic(size) if wanted == "auto" else wanted
        if first and count > size:
            raise ValueError(
                f"microbatches={wanted}, but the first batch has only {size} samples: use at most {size} "
                f"microbatches, or a larger batch_size in the DataLoader."
            )
        lengths = sizes(size, min(count, size))  # the last batch of an epoch may be smaller
        return split_into(batch, lengths), lengths


def _guess(batch: Any) -> int:
    try:
        return extract_batch_size(batch)  # as Lightning weighs what one process logs
    except Exception:  # it finds no tensor with a dimension
        return 1
