"""One forward pass of the user's step through a chunk: which units are called, what arrives, what departs.

A stage's hooks (``stage.py``) report each call to it. It knows for which calls the previous chunk has sent the output,
and keeps what later chunks need.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

from torch import Tensor

from lightning_parallel.absent.tensor import first_absent
from lightning_parallel.cuts.flow import Flow, tensors_of
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.interception import LeaveStep
from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.private.torch.modules import has_gradient_hooks
from lightning_parallel.private.torch.tensors import tensors_in, tree_flatten, tree_unflatten
from lightning_parallel.tracing.trace import Call


class Cuts:
    """The cuts around one chunk, and what crosses them in a step with this flow.

    Attributes:
        into: the outputs that arrive, in order, by the chunk that has them: the previous one, or one of this stage.
        due: all of these outputs, and ``tensors_due`` the number of tensors in them.
        out_of: the outputs that depart, in order, by the chunk that gets them: the next one, or one of this stage.
        departing: the number of tensors in them, by the same chunk.
        wanted: the calls whose output a later chunk needs.
        last: the call after which the chunk leaves the step. None for the last chunk, and for one without calls.
        passed: the calls of later chunks before it.
        placed: the chunk of each call, as far as the dry run has made it.
        stage: the stage that runs the chunk.
    """

    def __init__(self, flow: Flow, partition: Partition, chunk: int) -> None:
        self.partition, self.chunk = partition, chunk
        self.into, self.out_of = flow.into(chunk), flow.out_of(chunk)
        self.due = [*chain(*self.into.values())]
        self.tensors_due = tensors_of(self.due)
        self.departing = {chunk: tensors_of(cargo) for chunk, cargo in self.out_of.items()}
        self.wanted = frozenset((item.module, item.call) for cargo in self.out_of.values() for item in cargo)
        self.last = flow.last[chunk] if chunk < partition.chunks - 1 else None
        self.passed = flow.passed[chunk]
        self.placed = flow.placed
        self.stage = partition.placement[chunk]


class ForwardPass:
    """A forward pass. ``arrival`` is what the previous chunk sent; None for the first chunk. It is shared out now, in
    the gradient and inference modes in which the step begins, whatever the user's code switches later.

    Raises:
        RuntimeError: another number of tensors has arrived than was due.
    """

    def __init__(self, cuts: Cuts, arrival: Arrival | None) -> None:
        self.cuts = cuts
        self._reached = 0  # the latest chunk of which a call has been made
        self._calls: defaultdict[str, int] = defaultdict(int)  # so far, by name
        received = [] if arrival is None else arrival.receive()
        if len(received) != cuts.tensors_due:
            raise RuntimeError(
                f"{len(received)} tensors arrived on stage {cuts.stage}, but {cuts.tensors_due} were due, the "
                f"outputs of {', '.join(repr(c.module) for c in cuts.due)}: the number of a layer's outputs must "
                f"not depend on values, nor change from batch to batch."
            )
        tensors = iter(received)
        # By call, its output as the previous chunk sent it.
        self._arrived: dict[Call, list[Tensor]] = {
            (c.module, c.call): [next(tensors) for _ in range(c.tensors)] for c in cuts.due
        }
        self._kept: dict[Call, list[Tensor]] = {}
        for call in self._arrived.keys() & cuts.wanted:  # it goes further on as it came, whatever this stage does to it
            self._kept[call] = self._arrived[call]
            self._arrived[call] = [t.clone() for t in self._kept[call]]

    def chunk_of(self, name: str) -> int:
        """The chunk that runs the next call of a unit. One that the dry run hasn't made comes after all that were."""
        call = name, self._calls[name]
        placed = self.cuts.placed.get(call)
        return self.cuts.partition.chunk_of(call, self._reached) if placed is None else placed

    def called(self, name: str) -> Call:
        """Count a call of a unit, or of a module inside one.

        Raises:
            LeaveStep: it is the next chunk's turn. If the chunk hasn't left the step by then, the step makes fewer
                calls here than in the dry run, or none.
        """
        call = name, self._calls[name]
        if name in self.cuts.partition.units:
            chunk = self.cuts.placed.get(call)
            if chunk is None:
                chunk = self.chunk_of(name)
            if chunk > self.cuts.chunk and call not in self.cuts.passed:
                raise LeaveStep
            self._reached = max(self._reached, chunk)
        self._calls[name] += 1
        return call

    # -- what arrives --------------------------------------------------------------------------------------------

    def filled(self, answer: Any, call: Call) -> Any:
        """An absent unit's answer with the tensors that have arrived for the call, if any, in the place of absent
        ones."""
        live = self._arrived.get(call)
        if live is None:
            return answer
        if isinstance(answer, Tensor) and len(live) == 1:
            return live[0]
        leaves, spec = tree_flatten(answer)
        holes = [j for j, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(holes) != len(live):
            raise RuntimeError(
                f"'{call[0]}' returned {len(live)} tensors on its own stage, but {len(holes)} on another, where it was "
                f"asked on absent tensors: the number of its outputs must not depend on values."
            )
        for j, tensor in zip(holes, live, strict=True):
            leaves[j] = tensor
        return tree_unflatten(leaves, spec)

    def refuse_hooks(self) -> None:
        """Refuse hooks of the user's on the gradient of what arrived, after the step: its own stage runs them, too."""
        for (name, _), tensors in self._arrived.items():
            if any(map(has_gradient_hooks, tensors)):
                raise RuntimeError(
                    f"A hook on the gradient of what '{name}' returns would run on several stages. Register it in the "
                    f"layer's own forward."
                )

    # -- what departs --------------------------------------------------------------------------------------------

    def keep(self, call: Call, output: Any, *, copied: bool = True) -> None:
        """Keep a call's output for later chunks as it is now. The step may go on to change it in place, and will do so
        on the other stages too. If it can't any more (not ``copied``), the output itself is kept."""
        self._kept[call] = [t.clone() if copied else t for t in tensors_in(output)]

    def departure(self) -> list[Tensor]:
        """The tensors that the chunk hands on, in the order of ``cuts.out_of``."""
        cuts = self.cuts
        tensors: list[Tensor] = []
        for cargo in chain(*cuts.out_of.values()):
            kept = self._kept.get((cargo.module, cargo.call))
            if kept is None:
                raise RuntimeError(
                    f"'{cargo.module}' was not called as in the first step (call {cargo.call + 1}): what a pipeline's "
                    f"stages hand on must not change from batch to batch."
                )
            if len(kept) != cargo.tensors:
                raise RuntimeError(
                    f"'{cargo.module}' returned {len(kept)} tensors, but {cargo.tensors} in the dry run of the "
                    f"step: the number of its outputs must not depend on values, nor change from batch to batch."
                )
            tensors += kept
        absent = first_absent(tensors)
        if absent is not None:
            raise RuntimeError(
                f"What stage {cuts.stage} hands on depends on {absent.origin}, which lives on another stage."
            )
        return tensors
