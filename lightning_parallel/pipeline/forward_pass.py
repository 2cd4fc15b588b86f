"""One forward pass of the user's step through a stage: which owned modules are called, what arrives, what departs.

A stage's hooks (``stage.py``) tell it of each call. It knows of which calls the previous stage has sent the output,
waits for the message when the first of them is made, and keeps what later stages need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.absent import first_absent
from lightning_parallel.pipeline.arrival import Arrival, Departure
from lightning_parallel.pipeline.flow import Call, Cargo, Flow, check_order, tensors_of
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.torch_private import tree_leaves


class ArrivalFailedError(BaseException):
    """The message that the user's step waits for did not come. The cause says why. It is a BaseException, so that
    ``except Exception`` in the user's code doesn't catch it."""


@dataclass(frozen=True)
class Cuts:
    """What crosses the cuts around one stage.

    Attributes:
        partition: gives the layers' order.
        stage: whose cuts they are.
        before: the call of the layer before the stage's first; None on the first stage.
        cargo_in: what arrives besides that layer's output, in the order of the message.
        cargo_out: what departs besides the output of the stage's last layer.
        due: the calls whose output arrives.
        wanted: the calls whose output a later stage needs.
    """

    partition: Partition
    stage: int
    before: Call | None
    cargo_in: tuple[Cargo, ...]
    cargo_out: tuple[Cargo, ...]
    due: frozenset[Call]
    wanted: frozenset[Call]

    @classmethod
    def of(cls, flow: Flow, partition: Partition, stage: int) -> Cuts:
        """Those of a stage in a step with this flow."""
        cargo_in, cargo_out = flow.into(stage), flow.out_of(stage)
        first = partition.bounds[stage]
        before = None if stage == 0 else (partition.layers[first - 1], 0)
        due = {(cargo.module, cargo.call) for cargo in cargo_in} | ({before} if before else set())
        wanted = {(cargo.module, cargo.call) for cargo in cargo_out}
        return cls(partition, stage, before, cargo_in, cargo_out, frozenset(due), frozenset(wanted))


class ForwardPass:
    """Begun with the gradient and inference modes that hold then.

    Args:
        cuts: around the stage.
        arrive: gives what the previous stage sent; called once. None on the first stage.
        expect: gives what ``arrive`` will most likely give, before its values have come, or None.

    Attributes:
        grad: the pass began with gradients on.
        lost: the error with which the wait for the message ended, if it failed.
    """

    def __init__(
        self, cuts: Cuts, arrive: Callable[[], Arrival] | None, expect: Callable[[], Arrival | None] | None = None
    ) -> None:
        self.grad = torch.is_grad_enabled()
        self.lost: BaseException | None = None
        self._inference = torch.is_inference_mode_enabled()
        self._cuts = cuts
        self._next_layer = 0
        self._calls: dict[str, int] = {}
        self._arrive = arrive  # None once it has given what it gives
        self._unloaded: Arrival | None = None
        self._arrived: dict[Call, list[Tensor]] = {}
        self._kept: dict[Call, list[Tensor]] = {}
        # What is expected is shared out now, unless it has to be copied, for which its values must be there.
        expected = None if expect is None or cuts.due & cuts.wanted else expect()
        if expected is not None and len(expected.format) >= tensors_of(cuts.cargo_in):
            self._unload(expected)  # with fewer tensors it would be that of another step, with another flow

    def called(self, name: str, layer: int | None) -> Call:
        """Note the call of an owned module.

        Args:
            name: of the owned module.
            layer: its index among the layers, if it is one.

        Raises:
            LayerOrderError: another layer is due.
        """
        if layer is not None:
            check_order(self._cuts.partition, self._next_layer, layer)
            self._next_layer += 1
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return name, call

    def check_complete(self) -> None:
        """The step has come to its end: were all layers called?"""
        check_order(self._cuts.partition, self._next_layer, None)

    # -- what arrives --------------------------------------------------------------------------------------------

    def arrived(self, call: Call) -> list[Tensor] | None:
        """The output of a call that the previous stage sent, or None if it sent none. The first call of which it sent
        something waits for the message."""
        if call not in self._cuts.due:
            return None
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            # In the modes in which the step began, whatever the user's code has switched: a message holds more than
            # this call's output.
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
        cuts = self._cuts
        assert cuts.before is not None
        tensors = iter(arrival.receive())
        live = {(c.module, c.call): [next(tensors) for _ in range(c.tensors)] for c in cuts.cargo_in}
        live[cuts.before] = list(tensors)
        for call in live.keys() & cuts.wanted:  # it goes further on as it came, whatever this stage does to it
            self._kept[call] = live[call]
            live[call] = [t.clone() for t in live[call]]
        self._unloaded, self._arrived = arrival, live

    # -- what departs --------------------------------------------------------------------------------------------

    def keep(self, call: Call, output: Any) -> None:
        """Keep a call's output for later stages as it is now: the step may go on to change it in place, and will do so
        on the others too."""
        self._kept[call] = [t.clone() for t in _tensors_in(output)]

    def departure(self, output: Any) -> Departure:
        """What the stage sends on when its last layer has returned ``output``."""
        cuts = self._cuts
        tensors: list[Tensor] = []
        for cargo in cuts.cargo_out:
            kept = self._kept.get((cargo.module, cargo.call))
            if kept is None or len(kept) != cargo.tensors:
                raise RuntimeError(
                    f"'{cargo.module}' was not called as in the first step (call {cargo.call + 1}): what a pipeline's "
                    f"stages hand on must not change from batch to batch."
                )
            tensors += kept
        tensors += _tensors_in(output)
        absent = first_absent(tensors)
        if absent is not None:
            last = cuts.partition.layers[cuts.partition.bounds[cuts.stage + 1] - 1]
            raise RuntimeError(
                f"The output of '{last}' on stage {cuts.stage} depends on {absent.origin}, which lives on another "
                f"stage."
            )
        return Departure(tensors)


def _tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):  # as most outputs are; torch's walk through containers is slow
        return [output]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
