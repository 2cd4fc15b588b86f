"""Tests whether layers before the loss compute with several samples of a batch together.

A layer sees one microbatch at a time. If it computes with several samples, its output differs from that of one process:
a normalisation by the batch's own mean, attention over samples, a batch whose samples don't lie along dimension 0. So
in the first batch each chunk but the last runs again on the first two microbatches, alone and as one, in evaluation
mode::

    both     4 samples     what the chunk sends on
    each     2 samples     what it sends on, joined        -> if it isn't the same, samples are mixed

The last chunk's part is tried by its loss (``loss_pairs.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.batch import split_into
from lightning_parallel.losses.trial import joined
from lightning_parallel.pipeline.chunk import Mixing
from lightning_parallel.plan.partition import Partition
from lightning_parallel.ranks.run import Run
from lightning_parallel.ranks.writes import WritesRefused
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.steps.loss_pairs import FAILURES, TOLERANCES, without_effect
from lightning_parallel.values import first_few

Step = Callable[[Any], Callable[[], Any]]  # makes the step of a batch
Runner = Callable[[Callable[[], Any], Sequence[Tensor]], list[Tensor]]


class SampleMixing:
    """Runs these trials on this rank."""

    def __init__(self, run: Run, last_stage: LastStage, partition: Partition) -> None:
        self._run, self._last_stage, self._partition = run, last_stage, partition
        self._arrived: dict[int, Sequence[Tensor]] = {}  # by chunk, for the first microbatch

    def trial(self, step: Step, batch: Any, sizes: Sequence[int], index: int) -> Mixing | None:
        """The trial that a chunk before the last runs after a microbatch's forward in the first batch, or None.

        Args:
            step: makes the user's step of a part of the batch.
            batch: as the loader gave it.
            sizes: the number of samples in each microbatch.
            index: the microbatch's number in the batch.
        """
        return partial(self._try, step, batch, sizes, index) if index < 2 <= len(sizes) else None

    def _try(
        self,
        step: Step,
        batch: Any,
        sizes: Sequence[int],
        index: int,
        chunk: int,
        arrived: Sequence[Tensor],
        run: Runner,
    ) -> None:
        if index == 0:
            self._arrived[chunk] = arrived
            return
        pair = (sizes[0], sizes[1])
        first = self._arrived.pop(chunk)

        def sent(lengths: Sequence[int], index: int, tensors: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
            with without_effect(self._run, self._last_stage, seed), torch.no_grad():
                with WritesRefused(self._run.module.parameters()):
                    return run(step(split_into(batch, lengths)[index]), tensors)

        whole = [sum(pair), *sizes[2:]]
        try:
            both = [joined(*tensors, pair) for tensors in zip(first, arrived, strict=True)]
            together = [tensor for tensor in both if tensor is not None]
            if len(together) < len(both):
                return
            one, other = sent(sizes, 0, first), sent(sizes, 1, arrived)
            # Both in any case: tensor ranks run them together, and may see differences in some of their pieces only.
            as_one, again = sent(whole, 0, together), sent(whole, 0, together, 1)
            mixed = any(_differ(*each, pair) for each in zip(as_one, one, other, strict=True))
            if not mixed or not all(map(torch.equal, as_one, again)):
                return  # nothing is mixed, or the chunk draws random numbers in evaluation mode, too
        except FAILURES:
            return  # the step can't run on other numbers of samples, or makes another number of tensors of them
        self._warn(chunk, len(sizes))

    def _warn(self, chunk: int, count: int) -> None:
        layout = self._run.layout
        if layout.index("data") or layout.index("tensor"):
            return  # the first replica and tensor rank warns
        units = [repr(name) for name, chunks in self._partition.units.items() if chunk in chunks]
        warnings.warn(
            f"training_step computes with several samples of a batch together, in or before {first_few(units)}: "
            f"a statistic of the batch, attention over samples, or a batch whose samples don't lie along dimension 0. "
            f"There it sees one of {count} microbatches, so the loss differs from that of one process. Use "
            f"microbatches=1.",
            stacklevel=2,
        )


def _differ(whole: Tensor, one: Tensor, other: Tensor, sizes: tuple[int, int]) -> bool:
    parts = joined(one, other, sizes)
    if parts is None or parts.shape != whole.shape:
        return True  # both depend on their samples, but nothing shows along which dimension these lie
    if not whole.is_floating_point():
        return not torch.equal(parts, whole)
    tolerance = TOLERANCES.get(whole.dtype, 0.02) * 10 * float(whole.abs().max().nan_to_num())
    return not torch.allclose(parts, whole, 0.0, tolerance, equal_nan=True)
