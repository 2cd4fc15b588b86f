"""The order in which a step's calls are shared out to chunks: that of the step, but each unit's calls together.

A step may run its layers once for each view of a batch. It is cut as if it ran them once, on all views::

    called       backbone  head  backbone  head
    shared out   backbone  backbone | head  head

The step runs as written on every stage: the first one answers for the head by absent tensors, and goes on to its second
call of the backbone. So a call is shared out earlier only as far as all that it needs is computed there or before.
"""

from __future__ import annotations

from lightning_parallel.tracing.trace import Trace


def shared_out(seen: Trace) -> list[int]:
    """The indices of a trace's calls, in the order in which they are shared out. A unit's further calls follow its
    earlier ones, or the last of the calls that they need."""
    # What is written to the batch, or to parameters, may be needed by all calls that follow.
    barriers = [index + 1 for index in seen.overwriting]
    barriers += [update.place.index + 1 for update in seen.updates if update.place and update.by_layers]
    keys: list[int] = []  # for each call the index of that after which it is shared out, or its own
    last: dict[str, int] = {}  # of each unit: the index of its last call so far
    for i, (call, sources) in enumerate(zip(seen.calls, seen.sources(), strict=True)):
        key = i
        if call.unit in last:
            before = {last[call.unit], *sources}
            key = max([*(keys[j] for j in before), *(barrier for barrier in barriers if barrier <= i)])
        keys.append(key)
        last[call.unit] = i
    return sorted(range(len(keys)), key=keys.__getitem__)  # stable: calls with one key stay in their order
