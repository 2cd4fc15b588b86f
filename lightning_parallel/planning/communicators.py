"""The memory that NCCL takes for the communicators of a rank, by a formula.

A communicator joins the ranks of a group. It has *channels*, which a collective uses side by side. On each channel a
rank has a connection to each neighbour, and a connection has a buffer where it ends::

    NCCL_BUFFSIZE 4 MiB + NCCL_LL128_BUFFSIZE 4.7 MiB + NCCL_LL_BUFFSIZE 0.5 MiB, in pages of 2 MiB: 10 MiB
    where it begins, one page for flags:                                                               2 MiB

They are in NCCL's source: ``computeBuffSizes`` in src/init.cc, ``p2pSendSetup`` and ``p2pRecvSetup`` in
src/transport/p2p.cc. A group's collectives go both ways between neighbours: in a ring one way, in a tree the other way
too. A message between stages goes one way, and each cut and each kind has a communicator of its own
(``ranks/groups.py``).

With the 24 channels of A100 or H100 in a box a group takes 576 MiB; docs/which-layout.md has what others have measured.
Not counted are the buffers of NVLink SHARP, and the group in which an optimizer like Muon steps divided parameters of a
pipeline with replicas. Between nodes messages share buffers, so there it counts too much.
"""

from __future__ import annotations

from itertools import pairwise

from lightning_parallel.costs.devices import Channels
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.planning.layouts import Choice
from lightning_parallel.ranks.layout import AXES, Layout

_CONNECTIONS = 12 * 2**20  # one that begins at a rank, and one that ends there


def nccl_buffers(choice: Choice, stage: int, parts: Partition, channels: Channels) -> int:
    """The bytes on a rank of a stage, when all its groups are connected."""
    of_groups, of_messages = channels
    # Over a cut an activation goes one way, and a gradient the other.
    cuts = sum(stage in ends for ends in pairwise(choice.placement) if len(set(ends)) > 1)
    return _CONNECTIONS * (2 * of_groups * _groups(choice, stage, parts) + of_messages * cuts)


def _groups(choice: Choice, stage: int, parts: Partition) -> int:
    """The groups of several ranks that a rank of the stage is in, with the world."""
    first = Layout.resolve(choice.ranks, pipeline=choice.stages, data=choice.data, tensor=choice.tensor)
    if choice.strategy == "ddp" or first.world_size == 1:
        return first.world_size > 1  # Lightning's has the world alone
    layout = first.at(first.rank_at(pipeline=stage))
    joined = [*(layout.peers(axis.name) for axis in AXES), layout.model_peers()]
    for holders in parts.shared().values():
        joined.append([layout.rank_at(pipeline=each) for each in holders] if stage in holders else [])
    return 1 + len({tuple(sorted(ranks)) for ranks in joined if len(ranks) > 1})
