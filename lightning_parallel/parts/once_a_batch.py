"""Parameters that the user's own code changes in each step, as a mean teacher's are: once a batch.

A step is called for each microbatch. So that each call finds what the batch's one call would find, the parameters are
put back before the second and further ones::

    one process     t -> t'
    microbatches    t -> t'    back to t -> t'    back to t -> t'
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
        names: of the parameters.
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
        for tensor, before in zip(self._changing, self._before, strict=True):
            tensor.data.copy_(before)  # past autograd, as the step itself: backwards find the value that is set again
