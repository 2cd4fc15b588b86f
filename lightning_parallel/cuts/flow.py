"""Describes what crosses the cuts between chunks in a step: the outputs of units that a later chunk needs.

Where each layer needs the output of the layer before it and nothing else, that output crosses. Many models hand on
more: an encoder's output that every decoder layer attends to, a second embedding, a U-Net's skip connections. A trace
of the step (``tracing/dry_run.py``) shows what is needed where. If a unit in chunk 2 gets the output of a unit in chunk
0, that output crosses the cuts 0|1 and 1|2, and its gradient comes back the same way::

    chunk 0          chunk 1          chunk 2
    down.0 ----------------------------> up.1
    down.1 --------> middle -----------> up.0

A stage with several chunks sends itself nothing that it has: what a chunk needs of an earlier one of its own stage is
*kept* there, and crosses no cut in between. In a V, whose first and last chunks share a stage, a skip connection from
the first layers to the last ones is no message::

    stage 1   chunk 0 -- kept --> chunk 3
    stage 0   chunk 1 ----------> chunk 2

What the user's code computes between units is computed again in each chunk that needs it. The end of the step, its loss
and its logs, belongs to the last chunk: whatever they were computed from is needed there (a penalty on an early layer's
output, a variational autoencoder's divergence).

A value that *escapes* from inside a unit (a hook that collects the router's logits, ``self.attention = weights``) and
is needed in a later chunk crosses too. There the unit is *transparent*: its own code runs on absent tensors, so that
the hooks inside fire, and the modules inside that the value comes from answer with what arrived.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from lightning_parallel.ranks.layout import Placement
from lightning_parallel.tracing.trace import Call

Pair = tuple[int, int]  # a chunk that keeps something for a later one of its stage
Way = tuple[set[int], set[Pair]]  # the cuts that a value crosses, and the pairs between which it stays

TWICE = "A stage with several chunks runs this code once in each of them:"  # in errors


@dataclass(frozen=True)
class Cargo:
    """The output of one call of a module (the ``call``-th in a step, from 0), which crosses a cut. ``tensors`` is the
    number of tensors in it."""

    module: str
    call: int
    tensors: int


@dataclass(frozen=True)
class Flow:
    """What crosses each cut c | c+1, and where each chunk leaves the step.

    Attributes:
        cuts: the cargo of each cut, in the order in which it is computed.
        kept: the cargo that stays on a stage, by the chunk that has it and the later one that needs it.
        last: for each chunk its last call, or that of the step if earlier chunks make all calls; None if it has none.
        passed: for each chunk the calls of later chunks that come before its last one. It goes on with absent tensors.
        placed: the chunk of each call in the dry run.
        transparent: units whose own code runs where they are absent, for values that escape from them.
        inside: the modules inside transparent units whose outputs cross.
        updated: the parameters that the step's own code changes, from parameters alone: a teacher's, by the student's.
        own_updates: the parameters, buffers and numbers that units change themselves (:attr:`.Trace.own_updates`).
        carried: other values that the step's own code changes from step to step.
        put_back: what the code after the layers gives its old contents again (:attr:`.Trace.put_back`).
    """

    cuts: tuple[tuple[Cargo, ...], ...]
    last: tuple[Call | None, ...]
    passed: tuple[frozenset[Call], ...]
    transparent: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()
    carried: frozenset[str] = frozenset()
    put_back: frozenset[str] = frozenset()
    kept: dict[tuple[int, int], tuple[Cargo, ...]] = field(default_factory=dict, hash=False)
    placed: dict[Call, int] = field(default_factory=dict, hash=False)
    own_updates: dict[str, bool] = field(default_factory=dict, hash=False)

    def into(self, chunk: int) -> dict[int, tuple[Cargo, ...]]:
        """What a chunk gets, by the chunk that has it: the previous one first, then others of its stage."""
        before = {chunk - 1: self.cuts[chunk - 1]} if chunk > 0 else {}
        return before | {one: cargo for (one, other), cargo in sorted(self.kept.items()) if other == chunk}

    def out_of(self, chunk: int) -> dict[int, tuple[Cargo, ...]]:
        """What a chunk hands on, by the chunk that gets it: the next one first, then others of its stage."""
        after = {chunk + 1: self.cuts[chunk]} if chunk < len(self.cuts) else {}
        return after | {other: cargo for (one, other), cargo in sorted(self.kept.items()) if one == chunk}


def way_of(owner: int, users: Collection[int], stages: Placement) -> Way:
    """The cuts that a value crosses from its owner to the later chunks that need it, and the pairs of chunks of one
    stage between which it stays there. ``stages``: of each chunk."""
    having, crossed, stays = {owner, *users}, set[int](), set[Pair]()
    for chunk in range(max(users), owner, -1):
        if chunk not in having:
            continue
        own = [each for each in having if each < chunk and stages[each] == stages[chunk]]
        if own and max(own) < chunk - 1:
            stays.add((max(own), chunk))
        else:
            crossed.add(chunk - 1)
            having.add(chunk - 1)
    return crossed, stays


def tensors_of(cargo: Iterable[Cargo]) -> int:
    """The number of tensors in a cargo."""
    return sum(item.tensors for item in cargo)


class FlowError(RuntimeError):
    """A step needs something in a chunk that can't have it there."""
