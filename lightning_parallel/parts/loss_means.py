"""What weight each microbatch has, so that the weighted mean of the losses is the loss of the batch.

Weights are by samples, by what the terms of the loss count (:mod:`lightning_parallel.pipeline.loss_terms`), or by what
the user's function says. They matter on the last stage only, where losses are. What can't be right is warned of once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel.pipeline.loss_terms import LossTerms
from lightning_parallel.pipeline.recording import Recording
from lightning_parallel.pipeline.watching import Playing, Watching, kept_out_of

_NORMALISE_OVER_SAMPLES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class LossMeans:
    """The weights of microbatches.

    Args:
        module: whose loss it is.
        apart: modules whose insides don't belong to the loss: the layers, and what other stages hold.
        wanted: the setting ``microbatch_weight``.
        is_last_stage: losses are computed here.
        device: of this rank.
    """

    def __init__(
        self,
        module: nn.Module,
        apart: Iterable[nn.Module],
        wanted: Callable[[Any], float] | None,
        *,
        is_last_stage: bool,
        device: torch.device,
    ) -> None:
        self._module = module
        # A metric's own state isn't the loss.
        self._apart = [*apart, *(part for part in module.modules() if isinstance(part, Metric))]
        self._wanted = wanted
        self._is_last_stage = is_last_stage
        self._device = device
        self._warned: set[str] = set()
        self._is_first_batch = True
        self._watches = wanted is None and is_last_stage  # in the batch that is to run
        self._mode: Watching | None = None  # which watches the step that runs

    def of(self, batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> tuple[list[float], LossTerms | None]:
        """The weights of a batch's microbatches, and the terms of its loss if they are to be watched.

        Args:
            batch: as the loader gave it.
            parts: its microbatches.
            sizes: of the microbatches.

        Raises:
            ValueError: ``microbatch_weight`` returned something else than a number of at least 0.
        """
        first, self._is_first_batch = self._is_first_batch, False
        by_samples = [float(size) for size in sizes]
        self._watches = len(parts) > 1 and self._wanted is None and self._is_last_stage
        if len(parts) == 1:
            return by_samples, None
        if first:
            self._warn_of_batch_norm(sizes)
        if self._wanted is not None:
            # In the first batch on all stages, so that an error is raised on all.
            return self._by_function(self._wanted, parts) if first or self._is_last_stage else by_samples, None
        if not self._watches:
            return by_samples, None
        checks = first or self._device.type == "cpu"
        return by_samples, LossTerms(batch, parts, sizes, warn=self._warn, checks=checks)

    @contextmanager
    def around_batch(self) -> Iterator[None]:
        """Around the steps of a batch's microbatches, which may be :meth:`watched`."""
        with kept_out_of(lambda: self._mode, self._apart if self._watches else ()):
            yield

    @contextmanager
    def watched(self, terms: LossTerms, number: int) -> Iterator[Watching | None]:
        """Around the step of a microbatch on the last stage.

        Args:
            terms: of its batch. The first microbatch that runs finds them.
            number: of the microbatch, within its batch.
        """
        mode: Watching
        assert self._mode is None, "one step at a time"
        if not terms.recorded:
            terms.recorded = True
            mode = Recording(terms, number, terms.leaves(number))
        elif terms.need_watching:
            mode = Playing(terms, number)
        else:
            yield None
            return
        self._mode = mode
        try:
            with mode:
                yield mode
        finally:
            self._mode = None
        mode.end()

    def _by_function(self, function: Callable[[Any], float], parts: Sequence[Any]) -> list[float]:
        weights = []
        for part in parts:
            weight = function(part)
            scalar = isinstance(weight, Tensor) and weight.numel() == 1
            number = float(weight) if scalar or isinstance(weight, int | float) else math.nan
            if not 0 <= number < math.inf:
                raise ValueError(
                    f"microbatch_weight returned {weight!r}: it has to return what the loss of a microbatch averages "
                    f"over, a number of at least 0."
                )
            weights.append(number)
        return weights if any(weights) else [1.0] * len(weights)  # all 0: the loss is 0 / 0, as in one process

    def _warn(self, key: str, words: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(words)

    def _warn_of_batch_norm(self, sizes: Sequence[int]) -> None:
        for name, part in self._module.named_modules():
            if isinstance(part, _NORMALISE_OVER_SAMPLES) and part.training:
                self._warn(
                    "batch norm",
                    f"'{name}' is a {type(part).__name__}, which normalises over the {sizes[0]} samples of a "
                    f"microbatch, not over the {sum(sizes)} of a batch: the loss differs from that of one process. Use "
                    f"microbatches=1, or GroupNorm or LayerNorm.",
                )
                return
