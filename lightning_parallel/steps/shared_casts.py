"""Under autocast, a batch's microbatches share one cast of each trained weight.

Lightning switches autocast's cache off, so that each forward casts the weights anew, and autograd keeps every cast for
the backward. A process that runs one batch at a time has one such copy. A stage would have one for each microbatch in
flight: with GPipe, two bytes for each parameter and microbatch (``w0`` is the cast of microbatch 0)::

    own casts       F0 (w0)  F1 (w1)  F2 (w2)   B0  B1  B2
    shared          F0 (w)   F1  (w)  F2  (w)   B0  B1  B2   the cache is emptied

Gradients are the same: each backward casts its own back, and adds it to the parameter's. The cache is emptied after the
batch, and where weights are updated within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The first torch that keeps no cast which was made under no_grad, through which no gradient would flow.
_SINCE = (2, 13)


class SharedCasts:
    """Shares casts among the microbatches of a batch, where torch keeps gradients through them.

    Args:
        device: the type of the stage's device (``"cuda"``).

    Attributes:
        may_share: may the batch that is running share casts? Not if its steps change weights: then each needs a cast
            of the values that it reads.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._knows_gradients = tuple(map(int, torch.__version__.split(".")[:2])) >= _SINCE
        self.may_share = False

    @contextmanager
    def around_batch(self) -> Iterator[None]:
        """Inside, forwards share casts. Autocast itself is as it was: a step's own context switches it on. The end of
        the outermost context empties the cache."""
        dtype, enabled = torch.get_autocast_dtype(self._device), torch.is_autocast_enabled(self._device)
        with torch.autocast(self._device, dtype, enabled=enabled):
            yield

    def begin_step(self) -> None:
        """Switch the cache on, if the batch may share casts. The step's own context, inside which this is called,
        switches it off again."""
        if self.may_share and self._knows_gradients:
            torch.set_autocast_cache_enabled(True)
