"""Parameters that a step changes in place: where a rank has a part of them, or a copy for a time, that goes wrong.

They are found by their values, since a write to ``weight.data`` counts no version up. This reads the parameters twice a
step, so only the first steps are watched. The second is, too: a mask changes nothing where weights are masked already,
and then what the optimizer has made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lightning_parallel.collectives import Group, gather_objects

_STEPS = 2  # that are watched


class Writes:
    """Watches parameters while a step's code runs, in the first steps.

    Args:
        explain: the words of the error, given a parameter's name.
        group: the ranks that run the same steps.
    """

    def __init__(self, explain: Callable[[str], str], group: Group) -> None:
        self._explain = explain
        self._group = group
        self._left = _STEPS
        self._before: dict[str, tuple[int, Tensor]] = {}
        self._found: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Is the step that runs one of the first?"""
        return self._left > 0

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Code is about to run that must not change these."""
        if self.is_on:
            self._before |= {name: _state_of(parameter) for name, parameter in parameters.items()}

    def end(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """It has run. Those of which :meth:`begin` wasn't told don't matter."""
        for name, parameter in parameters if self._before else ():
            if name in self._before:
                memory, digest = self._before.pop(name)
                new_memory, new_digest = _state_of(parameter)
                if new_memory != memory or not torch.equal(new_digest, digest):
                    self._found.add(name)

    def check(self) -> None:
        """A step is over. All ranks of the group call it.

        Raises:
            ValueError: on all ranks, if one has found a change.
        """
        if not self.is_on:
            return
        self._left -= 1
        found = sorted(set().union(*gather_objects(self._found, self._group)))
        if found:
            raise ValueError(self._explain(found[0]))


def _state_of(tensor: Tensor) -> tuple[int, Tensor]:
    """Where a tensor lies (``weight.data = ...`` puts another one in its place), and a sum over its bits, which nearly
    every change changes."""
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    raw = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return raw.data_ptr(), raw.view(wide[raw.element_size()]).sum(dtype=torch.int64)
