"""Ends the run if the step changes what the dry run hasn't seen it change: a parameter, or a buffer of several stages.

The step is called for each microbatch, so it would change each time what one process changes once a batch. What the dry
run sees, ``once_a_batch.py`` prevents. But layers are absent then, and a change may come later
(``if batch_idx == 100``). The versions that autograd counts tell of both, and cost nothing to read::

    microbatch 0      version 7 -> 8   written to
    microbatch 1      version 8 -> 9   written to again: the values before and after it are compared.
                                       If they differ, the run ends. If not, the step puts back what it changes.
    microbatch 2 ...                   not watched
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.interception import LeaveStep
from lightning_parallel.private.torch import parameters_of, version_of
from lightning_parallel.ranks.writes import digest

_WATCHED = 2  # microbatches of a batch

_FIX = "Change it in a hook such as on_train_batch_end, or use microbatches=1."


class UnseenWrites:
    """Watches the parameters of ``module`` in each batch's first microbatches, and in all microbatches ``shared``, the
    buffers of layers that other stages read."""

    def __init__(self, module: nn.Module, shared: Collection[str] = ()) -> None:
        self._module, self._shared = module, shared
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        # Where modules keep their parameters: gathering replaces them, and so does another version of the weights.
        self._slots = [
            (parameters_of(submodule), key, names[id(parameter)])
            for submodule in module.modules()
            for key, parameter in parameters_of(submodule).items()
            if parameter is not None
        ]
        self._known: Collection[str] = ()
        self._is_on = False  # does a batch take several runs?
        self._must_all_change = False  # would each microbatch's run have to make a change?
        self._written: set[str] = set()  # by exactly one run of this batch so far
        self._put_back: set[str] = set()  # in each run, after a write: so does PEFT, for the time of a call

    def follow(self, known: Collection[str], microbatches: int, chunks: int) -> None:
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
        self._known, self._written = known, set()
        self._is_on, self._must_all_change = microbatches * chunks > 1, microbatches > 1 and chunks == 1

    @contextmanager
    def around_run(self, index: int) -> Iterator[None]:
        """A context for one run of the step, with the batch's microbatch of this index.

        Raises:
            RuntimeError: a layer has changed a buffer that other stages read; or a second run has changed a parameter.
        """
        buffers = self._buffers()
        parameters = self._parameters() if self._is_on and index < _WATCHED else {}
        values = {name: digest(parameters[name][0]) for name in self._written if name in parameters}
        try:
            yield
        except LeaveStep:
            self._check(buffers, parameters, values)
            raise
        else:
            self._check(buffers, parameters, values)

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """The identities and versions of the shared buffers that mustn't change."""
        buffers = ((name, self._module.get_buffer(name)) for name in self._shared if name not in self._known)
        here = ((name, buffer) for name, buffer in buffers if not isinstance(buffer, AbsentTensor))
        return {name: (id(buffer), version_of(buffer)) for name, buffer in here}

    def _parameters(self) -> dict[str, tuple[Tensor, int, int]]:
        """The parameters that are watched, with their addresses and versions."""
        found = ((name, store.get(key)) for store, key, name in self._slots)
        return {
            name: (parameter, parameter.data_ptr(), version_of(parameter))
            for name, parameter in found
            if parameter is not None
            and not isinstance(parameter, AbsentTensor)
            and name not in self._known
            and name not in self._put_back
        }

    def _check(
        self,
        buffers: dict[str, tuple[int, int]],
        parameters: dict[str, tuple[Tensor, int, int]],
        values: dict[str, Tensor],
    ) -> None:
        for name, state in self._buffers().items():
            if state != buffers[name]:
                raise RuntimeError(
                    f"A layer has changed its buffer '{name}', but not in the first step. training_step reads it on "
                    f"another stage, where it stays as it was: change it in a hook such as on_train_batch_end."
                )
        for name, (parameter, address, version) in parameters.items():
            if (parameter.data_ptr(), version_of(parameter)) == (address, version):
                continue
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
