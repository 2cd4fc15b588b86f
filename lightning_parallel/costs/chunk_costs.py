"""What each chunk of a cut module takes: its calls together, what crosses the cuts, and what stays on a stage."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.costs.code_around import CodeAround
from lightning_parallel.costs.layer_costs import Cost
from lightning_parallel.cuts.flow import way_of
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.private.torch.tensors import tree_leaves
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.ranks.local_model import memory_of
from lightning_parallel.tracing.trace import TracedCall


@dataclass(frozen=True)
class ChunkCost:
    """Of one microbatch.

    Attributes:
        forward, backward: seconds.
        first: the part of the backward that is in its first half.
        held: bytes from its forward to its backward, and between the halves of that.
        forward_peak, backward_peak: bytes of it at the fullest moment of its forward, or of its backward.
        sent: bytes that cross the cut after it.
        stays: bytes that stay on its stage for later chunks of it; and ``awaited``, that stayed there for this one.
        messages: seconds of the forward and the backward in which its tensor ranks exchange sums.
    """

    forward: float
    backward: float
    first: float
    held: int
    forward_peak: int
    backward_peak: int
    sent: int = 0
    stays: int = 0
    awaited: int = 0
    messages: float = 0.0


def of_chunks(
    costs: Sequence[tuple[TracedCall, Cost]], parts: Partition, code: CodeAround, again: Collection[str]
) -> list[ChunkCost]:
    """What each chunk takes for a microbatch.

    Args:
        costs: of the step's calls.
        code: around them.
        again: the layers of which only the inputs are held, and which run again in the backward.
    """
    items: list[list[tuple[TracedCall, Cost]]] = [[] for _ in parts.placement]
    for call, cost in costs:
        items[parts.calls[call.unit, call.call]].append((call, cost))
    return _with_messages([_chunk(own, again, code) for own in items], items, parts.placement)


def _chunk(items: Sequence[tuple[TracedCall, Cost]], again: Collection[str], code: CodeAround) -> ChunkCost:
    """The calls of a chunk together. Layers in ``again`` run again in the backward. What is held as an input isn't
    counted once more as an output, or as the input of another call."""
    taken = {key for call, cost in items for key in _inputs(call, cost, code)}
    inputs: dict[Hashable, float] = {}
    held = most_forward = most_backward = forward = backward = first = messages = 0.0
    for call, cost in items:
        is_taken = not taken.isdisjoint(code.returned.get(call.key, ()))
        inner = cost.inner + (0.0 if is_taken else cost.outputs)
        held += 0.0 if call.unit in again else inner
        own = _inputs(call, cost, code)
        if call.unit in again and not own:
            # The inputs of a layer that runs again are outputs of others: about as large as its own.
            own = {call.needs: cost.returned}
        inputs |= {key: max(inputs.get(key, 0.0), nbytes) for key, nbytes in own.items()}
        there = held + sum(inputs.values()) + cost.returned + (inner if call.unit in again else 0.0)
        # The code after it runs when the layer is done, and its backward when the layer's hasn't begun. That has the
        # gradients of its results, and of what these are made of: of the layer's output, for one.
        most_forward = max(most_forward, there + cost.forward_peak, there + cost.around)
        more = cost.kept + cost.around + max(0.0, cost.around - cost.returned)
        most_backward = max(most_backward, there + cost.backward_peak, there + more)
        held += cost.kept
        forwards = cost.forward + cost.sent_forward
        backwards = cost.backward + cost.sent_backward + forwards * (call.unit in again)
        forward += forwards
        backward += backwards
        # Layers that run again have a backward in one piece. What tensor ranks sum is an input's gradient.
        first += backwards if call.unit in again else cost.first + cost.sent_backward
        messages += (1 + (call.unit in again)) * cost.sent_forward + cost.sent_backward
    return ChunkCost(
        forward=max(1e-9, forward),
        backward=max(1e-9, backward),
        first=min(1.0, first / backward) if backward else 1.0,
        held=round(held + sum(inputs.values())),
        forward_peak=round(most_forward),
        backward_peak=round(most_backward),
        messages=messages,
    )


def _inputs(call: TracedCall, cost: Cost, code: CodeAround) -> dict[Hashable, float]:
    """The bytes of a call's inputs that are held, by their memory."""
    tensors = [x for x in tree_leaves(code.given.get(call.key)) if isinstance(x, Tensor)]
    keys = [x.memory if isinstance(x, AbsentTensor) else memory_of(x) for x in tensors]
    return {key: nbytes for key, nbytes in zip(keys, cost.inputs, strict=False) if nbytes}


def _with_messages(
    chunks: Sequence[ChunkCost], items: Sequence[Sequence[tuple[TracedCall, Cost]]], placement: Placement
) -> list[ChunkCost]:
    """The chunks with the bytes that cross the cuts between them, or stay on a stage for a later one. What the code
    around the layers reads at the step's end isn't known: it is taken to be the last layer's."""
    needed: dict[str, set[int]] = {}  # by origin, the chunks
    for number, own in enumerate(items):
        for call, _ in own:
            for origin in call.needs:
                needed.setdefault(origin, set()).add(number)
    sent, stays, awaited = ([0.0] * len(chunks) for _ in range(3))
    for number, own in enumerate(items):
        for call, cost in own:
            users = [each for each in needed.get(call.origin, ()) if each > number]
            crossed, pairs = way_of(number, users, placement) if users else (set(), set())
            for cut in crossed:
                sent[cut] += cost.returned
            for one, other in pairs:
                stays[one] += cost.returned
                awaited[other] += cost.returned
    # What its last layer doesn't return is there besides: given to a chunk, and as gradients that come back.
    more = [max(0.0, s - (own[-1][1].returned if own else 0.0)) for s, own in zip(sent, items, strict=True)]
    given = [before + here for before, here in zip([0.0, *more], awaited, strict=False)]
    return [
        replace(
            chunk,
            forward_peak=round(chunk.forward_peak + given[c]),
            backward_peak=round(chunk.backward_peak + given[c] + more[c] + stays[c]),
            sent=round(sent[c]),
            stays=round(stays[c]),
            awaited=round(awaited[c]),
        )
        for c, chunk in enumerate(chunks)
    ]
