"""Parameters that the step itself updates, such as a mean teacher's: once a batch, not once a microbatch.

The step runs for each microbatch. Before each run but the first, these parameters get their old values back::

    one process           t --step--> t'
    three microbatches    t --step--> t'   back to t --step--> t'   back to t --step--> t'
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.absent import AbsentTensor


class OnceABatch:
    """Puts parameters back.

    Args:
        module: whose parameters they are.

    Attributes:
        names: of the parameters and buffers that change in the batch that runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.names: list[str] = []
        self._changing: list[Tensor] = []
        self._before: list[Tensor] = []

    def follow(self, names: Collection[str]) -> None:
        """A batch is about to run, in which these parameters and buffers change. Those of other stages don't matter."""
        tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers()) if names else {}
        self.names = sorted(names)
        self._changing = [t for t in map(tensors.__getitem__, self.names) if not isinstance(t, AbsentTensor)]

    @torch.no_grad()
    def before(self, microbatch: int) -> None:
        """A microbatch's step is about to run: the batch's first one, or a further one."""
        if microbatch == 0:
            self._before = [tensor.clone() for tensor in self._changing]
        # .data counts no version up, so a backward that saved the tensor accepts it: its value will be the same again.
        for tensor, before in zip(self._changing, self._before, strict=True):
            tensor.data.copy_(before)
