"""A step of several passes (``passes.py``) in a pipeline.

The batch is divided into as many microbatches as there are stages, so that each stage has one to work on::

    stage 0     pass 1 of a | pass 1 of b | pass 2 of a | pass 2 of b | ...
    stage 1                 | pass 1 of a | pass 1 of b | pass 2 of a | ...
                                          |             |
                     what the pass returned, to all stages

Every rank runs the generators of all microbatches in turn. It waits for what a pass returned when that microbatch's
turn comes again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_parallel.batch import batch_size, join_outputs, sizes, split
from lightning_parallel.messages.side_links import next_message, side_links
from lightning_parallel.passes import Passes
from lightning_parallel.ranks.run import Run


def run_in_passes(
    generator: Callable[..., Passes],
    evaluate: Callable[[Callable[[], Tensor]], Tensor | None],
    stages: int,
    relay: Relay,
    batch: Any,
    *arguments: Any,
) -> Any:
    """Run a step of several passes on a batch, on all ranks of the pipeline. What the generators return is joined, and
    returned on every rank.

    Args:
        generator: makes the generator of a microbatch's passes.
        evaluate: runs one pass on this rank's stage. It returns what the pass returned on the last stage, None on the
            others.
        *arguments: the step's other arguments.
    """
    lengths = sizes(batch_size(batch), min(stages, batch_size(batch)))
    parts = split(batch, len(lengths)) if len(lengths) > 1 else [batch]
    turns = deque((number, generator(part, *arguments), False) for number, part in enumerate(parts))
    results: dict[int, Any] = {}
    while turns:
        number, passes, has_begun = turns.popleft()
        try:
            wanted = passes.send(relay.take()) if has_begun else next(passes)
        except StopIteration as end:
            results[number] = end.value
            continue
        relay.hand_on(evaluate(wanted))
        turns.append((number, passes, True))
    return join_outputs([results[number] for number in range(len(parts))], lengths)


class Relay:
    """Sends tensors from the last stage to all, in order. The last stage doesn't wait for the others."""

    def __init__(self, run: Run) -> None:
        last = run.layout.stages - 1
        self._is_source, self._device = run.layout.is_last_stage, run.device
        to = range(last if self._is_source else 0)
        self._senders, self._receivers = side_links(run, 2, to=to, of=[last], device=run.device)
        self._mine: deque[Tensor] = deque()  # on the source

    def hand_on(self, value: Tensor | None) -> None:
        """Send a tensor from the last stage. On the others this does nothing.

        Raises:
            TypeError: it is no tensor.
        """
        if not self._is_source:
            return
        if not isinstance(value, Tensor):
            raise TypeError(
                f"A pass of predict_step returned a {type(value).__name__}: what the other stages hear of it has to be "
                f"a tensor."
            )
        for sender in self._senders:
            sender.send([value.detach()], place=0)
        self._mine.append(value.detach())

    def take(self) -> Tensor:
        """Receive the next tensor."""
        if self._is_source:
            value = self._mine.popleft()
            for sender in self._senders:
                sender.flush(keep=len(self._mine))
            return value
        (receiver,) = self._receivers
        (value,) = next_message(receiver)
        return value.to(self._device, copy=True)
