"""Lets the step update a parameter, such as a mean teacher's, once a batch, not once a microbatch.

The step runs for each microbatch, and on a stage with several chunks for each of them. Before each run but the first,
these parameters get their old values back::

    one process           t --step--> t'
    three microbatches    t --step--> t'   back to t --step--> t'   back to t --step--> t'

The versions that autograd counts go back, too: the backward of an earlier microbatch may have saved t'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.private.torch import set_version, version_of


@dataclass(frozen=True)
class _State:
    """The value of a tensor, the memory where it lay, and its version."""

    value: Tensor
    memory: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _State:
        return cls(tensor.detach().clone(), tensor.data, version_of(tensor))

    def put_into(self, tensor: Tensor) -> None:
        if tensor.data_ptr() != self.memory.data_ptr():
            tensor.data = self.memory  # the step has replaced it, and an earlier microbatch's backward may read that
        tensor.data.copy_(self.value)  # .data counts no version up
        set_version(tensor, self.version)


class OnceABatch:
    """Puts back the parameters of ``module`` before each further run of the step in a batch. ``names`` are the
    parameters and buffers that change in the batch that is running."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.names: list[str] = []
        self._changing: dict[str, Tensor] = {}  # those of `names` that are on this stage
        self._before: dict[str, _State] = {}  # their states before the first run
        self._after: dict[str, _State] = {}  # and after the first run that has changed them

    def follow(self, names: Collection[str], runs: int) -> None:
        """Prepare a batch that takes this many runs of the step, in which these parameters and buffers change. Those of
        other stages are ignored."""
        self.names = sorted(names)
        self._changing, self._before, self._after = {}, {}, {}
        if names and runs > 1:
            tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
            self._changing = {name: tensors[name] for name in names if not isinstance(tensors[name], AbsentTensor)}
            self._before = {name: _State.of(tensor) for name, tensor in self._changing.items()}

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """A context for one run of the step. A run that is left before it changes a tensor (for an earlier chunk)
        leaves it as the other runs do, since their backwards may read it.

        Raises:
            RuntimeError: a run has changed a tensor to something else than the first one.
        """
        for name, before in self._before.items():
            before.put_into(self._changing[name])
        try:
            yield
        finally:
            for name, before in self._before.items():
                tensor = self._changing[name]
                if torch.equal(tensor, before.value):
                    if name in self._after:
                        self._after[name].put_into(tensor)
                elif name not in self._after:
                    self._after[name] = _State.of(tensor)
                elif not torch.equal(tensor, self._after[name].value):
                    raise RuntimeError(
                        f"training_step changes '{name}' by what is in the batch. It is called for each microbatch, "
                        f"and changes it otherwise in each: use microbatches=1."
                    )
