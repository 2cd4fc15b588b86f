"""Lets a step change parameters and buffers once a batch, not once a microbatch, or refuses the change.

The step runs for each microbatch, and on a stage with several chunks for each of them. What the dry run sees it change,
such as a mean teacher, gets its old value back before each run but the first::

    one process           t --step--> t'
    three microbatches    t --step--> t'   back to t --step--> t'   back to t --step--> t'

The versions that autograd counts go back, too: the backward of an earlier microbatch may have saved t'.

But layers are absent in the dry run, and a change may come later (``if batch_idx == 100``). Such a change of a
parameter, or of a buffer of several stages, ends the run. The versions tell of it, and cost nothing to read::

    microbatch 0      version 7 -> 8   written to
    microbatch 1      version 8 -> 9   written to again: the values before and after it are compared.
                                       If they differ, the run ends. If not, the step puts back what it changes.
    microbatch 2 ...                   not watched
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.interception import LeaveStep
from lightning_parallel.private.torch.modules import places_of
from lightning_parallel.private.torch.tensors import set_version, version_of
from lightning_parallel.ranks.writes import digest

_WATCHED = 2  # microbatches of a batch

_FIX = "Change it in a hook such as on_train_batch_end, or use microbatches=1."


@dataclass(frozen=True)
class _State:
    """The value of a tensor, the memory where it lay, and its version."""

    tensor: Tensor
    value: Tensor
    memory: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _State:
        return cls(tensor, tensor.detach().clone(), tensor.data, version_of(tensor))

    @property
    def holds(self) -> bool:
        """Has the tensor this value?"""
        return torch.equal(self.tensor, self.value)

    def put_back(self) -> None:
        if self.tensor.data_ptr() != self.memory.data_ptr():
            self.tensor.data = self.memory  # replaced by the step; an earlier microbatch's backward may read that
        self.tensor.data.copy_(self.value)  # .data counts no version up
        set_version(self.tensor, self.version)


class StepChanges:
    """Watches the runs of a step on ``module``.

    Args:
        shared: the buffers of layers that other stages read.

    Attributes:
        known: the parameters and buffers of which the dry run knows that they change in the batch that is running.
    """

    def __init__(self, module: nn.Module, shared: Collection[str] = ()) -> None:
        self._module, self._shared = module, shared
        self.known: list[str] = []
        self._before: dict[str, _State] = {}  # of those that are on this stage, before the first run
        self._after: dict[str, _State] = {}  # and after the first run that has changed them
        self._places = places_of(module, {id(parameter): name for name, parameter in module.named_parameters()})
        self._runs_several_times = False  # does a batch take several runs?
        self._must_all_change = False  # would each microbatch's run have to make a change?
        self._written: set[str] = set()  # by exactly one run of this batch so far
        self._put_back: set[str] = set()  # in each run, after a write: so does PEFT, for the time of a call

    def begin_batch(self, known: Collection[str], microbatches: int, chunks: int) -> None:
        """Prepare a batch, of which the dry run knows that these parameters and buffers change. It takes a run of the
        step for each microbatch and each chunk of the stage.

        Raises:
            RuntimeError: only one of the last batch's first microbatches has changed a parameter.
        """
        if self._must_all_change and self._written:
            raise RuntimeError(
                f"training_step has changed '{min(self._written)}' for one microbatch and not for another, so by what "
                f"is in it. In one process it sees the whole batch. {_FIX}"
            )
        self.known, self._written = sorted(known), set()
        self._runs_several_times, self._must_all_change = microbatches * chunks > 1, microbatches > 1 and chunks == 1
        self._before, self._after = {}, {}
        if known and self._runs_several_times:
            tensors = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
            here = {name: tensors[name] for name in known if not isinstance(tensors[name], AbsentTensor)}
            self._before = {name: _State.of(tensor) for name, tensor in here.items()}

    def run(self, step: Callable[[], Any], index: int) -> Any:
        """Run the step with the batch's microbatch of this index.

        Raises:
            RuntimeError: a layer has changed a buffer that other stages read; a second run has changed a parameter; or
                a run has changed a tensor that is known to change to something else than the first run.
        """
        if not (self._before or self._shared or (self._runs_several_times and index < _WATCHED)):
            return step()  # most runs have nothing to put back or to compare
        for before in self._before.values():
            before.put_back()
        watched = self._watched(index)
        values = {name: digest(watched[name][0]) for name in self._written if name in watched}
        try:
            output = step()
        except LeaveStep:
            self._end_run(index, watched, values)
            raise
        self._end_run(index, watched, values)
        return output

    def _watched(self, index: int) -> dict[str, tuple[Tensor, int, int]]:
        """The shared buffers and the parameters that mustn't change, with their addresses and versions."""
        found = [(name, self._module.get_buffer(name)) for name in self._shared]
        if self._runs_several_times and index < _WATCHED:
            found += [(name, store[key]) for store, key, name in self._places if store.get(key) is not None]
        return {
            name: (tensor, tensor.data_ptr() if tensor.layout is torch.strided else 0, version_of(tensor))
            for name, tensor in found
            if not isinstance(tensor, AbsentTensor) and name not in self.known and name not in self._put_back
        }

    def _end_run(self, index: int, watched: dict[str, tuple[Tensor, int, int]], values: dict[str, Tensor]) -> None:
        """Check what a run has changed, given the state before it."""
        now = self._watched(index)
        for name, begun in watched.items():
            found = now.get(name, begun)
            if isinstance(begun[0], DTensor) or isinstance(found[0], DTensor):  # gathered, or divided again
                found = (begun[0], begun[0].data_ptr(), version_of(begun[0]))
            parameter = found[0]  # the step may have put another one in its place
            if parameter is begun[0] and found[1:] == begun[1:]:
                continue
            if name in self._shared:
                raise RuntimeError(
                    f"A layer has changed its buffer '{name}', but not in the first step. training_step reads it on "
                    f"another stage, where it stays as it was: change it in a hook such as on_train_batch_end."
                )
            if name not in self._written:
                self._written.add(name)
            elif torch.equal(digest(parameter), values[name]):
                self._put_back.add(name)
                self._written.remove(name)
            else:
                raise RuntimeError(
                    f"training_step has changed '{name}' inside a layer, or not in the first step. It is called for "
                    f"each microbatch, and would change it each time. {_FIX}"
                )
        for name, before in self._before.items():
            after = self._after.get(name)
            if before.holds:  # left before the change, for an earlier chunk
                if after is not None:  # whose backward may read what other runs leave
                    after.put_back()
            elif after is None:
                self._after[name] = _State.of(before.tensor)
            elif not after.holds:
                raise RuntimeError(
                    f"training_step changes '{name}' by what is in the batch. It is called for each microbatch, and "
                    f"changes it otherwise in each: use microbatches=1."
                )
