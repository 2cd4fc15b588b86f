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

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.batch import batch_size, join_outputs, sizes, split
from lightning_parallel.collectives import guarded
from lightning_parallel.parts.run import Run
from lightning_parallel.passes import Passes

_DTYPES = (torch.int64, torch.int32, torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 6


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
        self._group, self._source, self._device = run.groups.host_group, run.last_rank, run.device
        self._mine: deque[tuple[Tensor, list[tuple[Any, Tensor]]]] = deque()  # on the source, with what is on its way

    def hand_on(self, value: Tensor | None) -> None:
        """Send a tensor from the last stage. On the others this does nothing.

        Raises:
            TypeError: it is no tensor that can be sent.
        """
        if dist.get_rank() != self._source:
            return
        if not isinstance(value, Tensor) or value.dtype not in _DTYPES or value.dim() > _MOST_DIMS:
            raise TypeError(
                f"A pass of predict_step returned {_described(value)}: what the other stages hear of it has to be a "
                f"tensor of at most {_MOST_DIMS} dimensions, and of a dtype among {', '.join(map(str, _DTYPES))}."
            )
        # Dtype, number of dimensions, shape.
        head = torch.zeros(_MOST_DIMS + 2, dtype=torch.int64)
        head[: value.dim() + 2] = torch.tensor([_DTYPES.index(value.dtype), value.dim(), *value.shape])
        content = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        self._mine.append((value.detach(), [(self._begun(each), each) for each in (head, content)]))

    def take(self) -> Tensor:
        """Receive the next tensor."""
        if dist.get_rank() == self._source:
            value, messages = self._mine.popleft()
            for work, _ in messages:
                guarded(work.wait)
            return value
        head = torch.empty(_MOST_DIMS + 2, dtype=torch.int64)
        guarded(self._begun(head).wait)
        kind, dims, *shape = head.tolist()
        value = torch.empty(shape[:dims], dtype=_DTYPES[kind])
        guarded(self._begun(value.reshape(-1).view(torch.uint8)).wait)
        return value.to(self._device)

    def _begun(self, tensor: Tensor) -> Any:
        return guarded(dist.broadcast, tensor, self._source, self._group, True)


def _described(value: object) -> str:
    return f"a {value.dtype} of shape {[*value.shape]}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
