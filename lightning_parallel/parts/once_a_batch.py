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
from lightning_parallel.torch_private import version_of


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
        self._microbatches = 1
        self._changing: list[Tensor] = []
        self._before: list[Tensor] = []
        self._frozen: list[tuple[Tensor, tuple[int, int]]] = []  # those that are not to change, and as they were

    def follow(self, names: Collection[str], microbatches: int) -> None:
        """A batch is about to run in so many microbatches, in which these parameters and buffers change. Those of other
        stages don't matter."""
        self.names, self._microbatches = sorted(names), microbatches
        tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers()) if names else {}
        self._changing = [tensors[name] for name in self.names if _is_here(tensors[name])]

    @torch.no_grad()
    def before(self, microbatch: int) -> None:
        """A microbatch's step is about to run: the batch's first one, or a further one.

        Raises:
            RuntimeError: the first one has changed a frozen parameter, which the look at the step hasn't seen.
        """
        if self._microbatches == 1:
            return
        if microbatch == 0:
            self._before = [tensor.clone() for tensor in self._changing]
            frozen = [p for p in self._module.parameters() if not p.requires_grad and _is_here(p)]
            self._frozen = [(p, _state_of(p)) for p in frozen if not any(p is changing for changing in self._changing)]
        elif microbatch == 1:
            for parameter, state in self._frozen:
                if _state_of(parameter) != state:
                    name = next(name for name, p in self._module.named_parameters() if p is parameter)
                    raise RuntimeError(
                        f"training_step has changed '{name}' inside a layer, or not in the first step. It is called "
                        f"for each microbatch, and would change it each time: change it in on_train_batch_end, or use "
                        f"microbatches=1."
                    )
        # .data counts no version up, so a backward that saved the tensor accepts it: its value will be the same again.
        for tensor, before in zip(self._changing, self._before, strict=True):
            tensor.data.copy_(before)


def _is_here(tensor: Tensor) -> bool:
    return not isinstance(tensor, AbsentTensor)


def _state_of(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), version_of(tensor)
