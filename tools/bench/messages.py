"""What tensor parallelism sends in a step: counted as operators, beside theory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from recipes.tables import Cell, Table
from recipes.traffic import Traffic, wire_bytes
from tools.bench import processes
from tools.bench.sharded import Contestant, blocks, ours, theirs

Sent = dict[str, tuple[int, int]]  # by collective: how many, and a rank's bytes on the wire


@dataclass(frozen=True)
class Sizes:
    """Blocks and what they are given, in float32."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    samples: int = 4
    length: int = 64


QUICK = Sizes(width=64, length=32)


def measure(sizes: Sizes) -> list[Table]:
    ranks = 2
    whole = sizes.samples * sizes.length * sizes.width * torch.float32.itemsize
    twice, once_more = 2 * sizes.layers, 2 * sizes.layers + 1
    plain = {"all-reduce": twice}
    # The last block's output is gathered; so is, in the backward, the gradient of what the first block split.
    pieces = {"all-gather": once_more, "reduce-scatter": twice}
    theory = {"": plain, ", sequence-parallel": pieces}
    rows: list[list[Cell]] = []
    for name, directions in processes.run(_sent, ranks, sizes)[0].items():
        counts = theory[name[name.index(",") :] if "," in name else ""]
        for direction, sent in directions.items():
            for collective in sorted(counts.keys() | sent.keys()):
                count, size = sent.get(collective, (0, 0))
                due = counts.get(collective, 0)
                due_bytes = due * wire_bytes(collective, whole, ranks)
                rows.append([name, direction, collective, count, due, size / 2**20, due_bytes / 2**20])
    return [
        Table(
            f"What is sent in a step: {sizes.layers} GPT blocks, d {sizes.width}, "
            f"{sizes.samples} x {sizes.length} tokens, float32, two ranks",
            {
                "contestant": "",
                "direction": "",
                "collective": "",
                "count": "d",
                "theory": "d",
                "MiB": ".3f",
                "theory (MiB)": ".3f",
            },
            rows,
            "Theory: two all-reduces a block and direction, each of batch x time x width numbers. Sequence-parallel: "
            "an all-gather and a reduce-scatter in the place of each, and one all-gather a direction at the ends of "
            "the chain. MiB: what each rank sends, as in a ring.",
        )
    ]


def _sent(sizes: Sizes) -> dict[str, dict[str, Sent]]:
    model = blocks(sizes.layers, sizes.width, sizes.heads)
    x = torch.randn(sizes.samples, sizes.length, sizes.width)
    contestants = {
        "ours": ours(model, x),
        "DTensor": theirs(model, x),
        "ours, sequence-parallel": ours(model, x, sequence_parallel=True),
        "DTensor, sequence-parallel": theirs(model, x, sequence_parallel=True),
    }
    return {name: _both_ways(contestant) for name, contestant in contestants.items()}


def _both_ways(contestant: Contestant) -> dict[str, Sent]:
    with Traffic() as forward:
        loss = contestant.forward()
    with Traffic() as backward:
        loss.backward()
    return {"forward": _counted(forward), "backward": _counted(backward)}


def _counted(traffic: Traffic) -> Sent:
    return {kind: (count, traffic.sent[kind]) for kind, count in traffic.messages.items()}
