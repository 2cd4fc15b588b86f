"""Lets the step update a parameter, such as a mean teacher's, once a batch, not once a microbatch.

The step runs for each microbatch, and on a stage with several chunks for each of them. Before each run but the first,
these parameters get their old values back::

    one process           t --step--> t'
    three microbatches    t --step--> t'   back to t --step--> t'   back to t --step--> t'

The versions that autograd counts go back, too: the backward of an earlier microbatch may have saved t'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.interception import LeaveStep
from lightning_parallel.private.torch import set_version, version_of
from lightning_parallel.ranks.writes import digest


@dataclass(frozen=True)
class _State:
    """The value of a tensor, and its version."""

    value: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _State:
        return cls(tensor.detach().clone(), version_of(tensor))

    def put_into(self, tensor: Tensor) -> None:
        tensor.data.copy_(self.value)  # .data counts no version up
        set_version(tensor, self.version)


class OnceABatch:
    """Puts back the parameters of ``module`` before each further run of the step in a batch. ``names`` are the
    parameters and buffers that change in the batch that is running. ``shared`` are the buffers of layers that other
    stages read."""

    def __init__(self, module: nn.Module, shared: Collection[str] = ()) -> None:
        self._module, self._shared = module, shared
        self.names: list[str] = []
        self._runs = 1  # of the step in the batch
        self._begun = 0  # of these
        self._changing: dict[str, Tensor] = {}  # those of `names` that are on this stage
        self._before: dict[str, _State] = {}  # their states before the first run
        self._after: dict[str, _State] = {}  # and after the first run that has changed them
        self._frozen: list[tuple[Tensor, tuple[int, int]]] = []  # parameters that must not change, and their states
        self._written: dict[int, Tensor] = {}  # by id, digests of frozen parameters that a run has written to
        self._put_back: set[int] = set()  # ids of those that each run writes to and restores itself

    def follow(self, names: Collection[str], runs: int) -> None:
        """Prepare a batch that takes this many runs of the step, in which these parameters and buffers change. Those of
        other stages are ignored."""
        self.names, self._runs, self._begun = sorted(names), runs, 0
        self._changing, self._before, self._after, self._frozen, self._written = {}, {}, {}, [], {}
        if names:
            tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
            self._changing = {name: tensors[name] for name in self.names if _is_here(tensors[name])}
        if runs > 1:
            self._before = {name: _State.of(tensor) for name, tensor in self._changing.items()}
            others = self._put_back | set(map(id, self._changing.values()))
            frozen = [p for p in self._module.parameters() if not p.requires_grad and _is_here(p)]
            self._frozen = [(p, _state_of(p)) for p in frozen if id(p) not in others]

    def around_run(self) -> AbstractContextManager[None]:
        """A context for one run of the step. A run that is left before it changes a tensor (for an earlier chunk)
        leaves it as the other runs do, since their backwards may read it.

        Raises:
            RuntimeError: a layer has changed a buffer that several stages hold; a run has changed a tensor to something
                else than the first one; or the second run has changed a frozen parameter again, which the dry run of
                the step didn't find.
        """
        needed = self._changing or self._shared or (self._frozen and self._begun < 2)
        return self._around_run() if needed else nullcontext()

    @contextmanager
    def _around_run(self) -> Iterator[None]:
        self._begun += 1
        self._restore()
        shared = self._shared_now()
        try:
            yield
        except LeaveStep:
            self._check_frozen()
            self._check_shared(shared)
            raise
        else:
            self._check_frozen()
            self._check_shared(shared)
        finally:
            self._leave()

    def _restore(self) -> None:
        for name, before in self._before.items():
            before.put_into(self._changing[name])

    def _leave(self) -> None:
        for name, before in self._before.items():
            tensor = self._changing[name]
            if torch.equal(tensor, before.value):
                if name in self._after:
                    self._after[name].put_into(tensor)
            elif name not in self._after:
                self._after[name] = _State.of(tensor)
            elif not torch.equal(tensor, self._after[name].value):
                raise RuntimeError(
                    f"training_step changes '{name}' by what is in the batch. It is called for each microbatch, and "
                    f"changes it otherwise in each: use microbatches=1."
                )

    def _shared_now(self) -> dict[str, tuple[int, int]]:
        """The identities and versions of the buffers that other stages read."""
        buffers = {name: self._module.get_buffer(name) for name in self._shared if name not in self.names}
        return {name: (id(buffer), version_of(buffer)) for name, buffer in buffers.items() if _is_here(buffer)}

    def _check_shared(self, before: dict[str, tuple[int, int]]) -> None:
        for name, state in self._shared_now().items():
            if state != before[name]:
                raise RuntimeError(
                    f"A layer has changed its buffer '{name}', but not in the first step. training_step reads it on "
                    f"another stage, where it stays as it was: change it in a hook such as on_train_batch_end."
                )

    def _check_frozen(self) -> None:
        """Compare the frozen parameters, in the first two runs of a batch. Versions cost nothing to read; only
        parameters that were written to are read, once in each run. PEFT writes to a parameter for a call, and puts it
        back."""
        if self._begun > 2:
            return
        for parameter, state in self._frozen:
            if _state_of(parameter) == state:
                continue
            before, now = self._written.get(id(parameter)), digest(parameter)
            self._written[id(parameter)] = now
            if before is None:
                continue
            if not torch.equal(now, before):
                name = next(name for name, p in self._module.named_parameters() if p is parameter)
                raise RuntimeError(
                    f"training_step has changed '{name}' inside a layer, or not in the first step. It is called "
                    f"for each microbatch, and would change it each time: change it in on_train_batch_end, or use "
                    f"microbatches=1."
                )
            self._put_back.add(id(parameter))


def _is_here(tensor: Tensor) -> bool:
    return not isinstance(tensor, AbsentTensor)


def _state_of(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), version_of(tensor)
