"""One forward pass of the user's step through a stage: what arrives, which units are called, what departs.

A stage's hooks (``stage.py``) tell it of each call. It knows of which calls the stage before has sent something, waits
for that when the first of them is made, and keeps what later stages need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_parallel.pipeline.absent import first_absent
from lightning_parallel.pipeline.crossing import Arrival, Departure
from lightning_parallel.pipeline.flow import Flow, order_checked, tensors_of
from lightning_parallel.pipeline.partition import Partition

Call = tuple[str, int]  # of a unit: its name, and which of its calls in a step


class ArrivalFailedError(BaseException):
    """For its cause there is nothing to go on with, in the midst of the user's step. A BaseException, so that ``except
    Exception`` in the user's code lets it pass."""


class ForwardPass:
    """Begun with the gradient and inference modes that hold then.

    Args:
        partition: who owns what.
        flow: what crosses the cuts.
        index: the stage.
        arrive: gives what the stage before sent; called once. None on the first stage.

    Attributes:
        grad: the pass began with gradients on.
        lost: why there is nothing to go on with behind the wait for what arrives.
    """

    def __init__(self, partition: Partition, flow: Flow, index: int, arrive: Callable[[], Arrival] | None) -> None:
        self.grad = torch.is_grad_enabled()
        self.lost: BaseException | None = None
        self._inference = torch.is_inference_mode_enabled()
        self._partition = partition
        owned = partition.layers_of(index)
        self._before = None if arrive is None else (partition.layers[owned.start - 1], 0)  # the layer before the cut
        self._last = partition.layers[owned.stop - 1]
        self._index = index
        self._next_layer = 0
        self._calls: dict[str, int] = {}
        self._arrive = arrive  # None: it has given what it gives
        self._cargo_in, self._cargo_out = flow.into(index), flow.out_of(index)
        self._due: set[Call] = {(cargo.module, cargo.call) for cargo in self._cargo_in}
        if self._before is not None:
            self._due.add(self._before)
        self._wanted: set[Call] = {(cargo.module, cargo.call) for cargo in self._cargo_out}
        self._unloaded: Arrival | None = None
        self._arrived: dict[Call, list[Tensor]] = {}
        self._kept: dict[Call, list[Tensor]] = {}

    # -- calls ---------------------------------------------------------------------------------------------------

    def count(self, name: str, layer: int | None) -> Call:
        """A unit is called. Is it its turn, if it is a layer (of that index)?"""
        if layer is not None:
            self._next_layer = order_checked(self._partition, self._next_layer, layer)
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return name, call

    def latest(self, name: str) -> Call:
        """The call of a unit that was counted last."""
        return name, self._calls[name] - 1

    def check_complete(self) -> None:
        """The step has come to its end: were all layers called?"""
        order_checked(self._partition, self._next_layer, None)

    # -- what arrives --------------------------------------------------------------------------------------------

    def unload_ahead(self, expect: Callable[[], Arrival | None]) -> None:
        """Share out what is expected before its values have come, if none of them has to be copied."""
        expected = None if self._due & self._wanted else expect()
        if expected is not None and len(expected) >= tensors_of(self._cargo_in):
            self._unload(expected)  # fewer would be those of another step, another flow

    def arrived(self, call: Call) -> list[Tensor] | None:
        """What the stage before sent of a call, or None. The first that it sent something of waits for it."""
        if call not in self._due:
            return None
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            # As where the step began, whatever the user's code has switched here: not all of it is for this call.
            with torch.inference_mode(self._inference), torch.set_grad_enabled(self.grad):
                try:
                    arrival = arrive()
                    if arrival is not self._unloaded:
                        self._unload(arrival)
                except BaseException as error:  # Ctrl-C too: what was expected has no values
                    self.lost, self._arrived = error, {}
                    if isinstance(error, Exception):
                        raise ArrivalFailedError from error
                    raise
        return self._arrived[call]

    def _unload(self, arrival: Arrival) -> None:
        """Share out what arrived over the calls that it comes from: the cargo, then the layer before the cut."""
        assert self._before is not None
        tensors = iter(arrival.receive())
        live = {(c.module, c.call): [next(tensors) for _ in range(c.tensors)] for c in self._cargo_in}
        live[self._before] = list(tensors)
        for call in live.keys() & self._wanted:  # further on, as it came, whatever this stage does to it
            self._kept[call] = live[call]
            live[call] = [t.clone() for t in live[call]]
        self._unloaded, self._arrived = arrival, live

    # -- what departs --------------------------------------------------------------------------------------------

    def is_wanted(self, call: Call) -> bool:
        """Does a later stage need what it returns?"""
        return call in self._wanted

    def keep(self, call: Call, output: Any) -> None:
        """For later stages, as it is now: the step may go on to change it in place, and will do so on the others."""
        self._kept[call] = [t.clone() for t in _tensors_in(output)]

    def departure(self, output: Any) -> Departure:
        """What the stage sends on, when its last layer has returned ``output``."""
        tensors: list[Tensor] = []
        for cargo in self._cargo_out:
            kept = self._kept.get((cargo.module, cargo.call))
            if kept is None or len(kept) != cargo.tensors:
                raise RuntimeError(
                    f"'{cargo.module}' was called otherwise than in the first step (call {cargo.call + 1}): what a "
                    f"pipeline's stages hand on must not change from batch to batch."
                )
            tensors += kept
        tensors += _tensors_in(output)
        absent = first_absent(tensors)
        if absent is not None:
            raise RuntimeError(
                f"The output of '{self._last}' on stage {self._index} depends on {absent.origin}, which lives on "
                f"another stage."
            )
        return Departure(tensors)


def _tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):  # as most are; pytree is slow
        return [output]
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
