"""What tensor parallelism sends in a step: counted as operators, beside theory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.bench import processes
from recipes.bench.report import Cell, Table
from recipes.bench.sharded import Contestant, blocks, ours, theirs

# The operators of torch.distributed, and those of its functional collectives, which DTensor uses.
_NAMES: Mapping[str, str] = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}

# Of the functional ones, what goes with a message without being one.
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")

Sent = dict[str, tuple[int, int]]  # by collective: how many, and bytes of the whole tensors


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
    whole = sizes.samples * sizes.length * sizes.width * torch.float32.itemsize
    twice, once_more = 2 * sizes.layers, 2 * sizes.layers + 1
    plain = {"all-reduce": twice}
    # The last block's output is gathered; so is, in the backward, the gradient of what the first block split.
    pieces = {"all-gather": once_more, "reduce-scatter": twice}
    theory = {"": plain, ", sequence-parallel": pieces}
    rows: list[list[Cell]] = []
    for name, directions in processes.run(_sent, 2, sizes)[0].items():
        counts = theory[name[name.index(",") :] if "," in name else ""]
        for direction, sent in directions.items():
            for collective in sorted(counts.keys() | sent.keys()):
                count, size = sent.get(collective, (0, 0))
                due = counts.get(collective, 0)
                rows.append([name, direction, collective, count, due, size / 2**20, due * whole / 2**20])
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
            "the chain. MiB: of the whole tensors, before any ring or tree.",
        )
    ]


class _Recorder(TorchDispatchMode):
    """Collectives are operators, so all ways to call one are seen, and those of a backward too."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and what it calls is seen
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in _LOCAL:
            collective = _NAMES.get(name, name)
            self._counts[collective] += 1
            self._bytes[collective] += max(_size(value) for value in (result, *args))
        return result

    def sent(self) -> Sent:
        return {name: (count, self._bytes[name]) for name, count in self._counts.items()}


def _size(value: Any) -> int:
    """Bytes of the tensors in an argument: pieces are given as a list of them."""
    return sum(x.nbytes for x in pytree.tree_leaves(value) if isinstance(x, Tensor))


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
    with _Recorder() as forward:
        loss = contestant.forward()
    with _Recorder() as backward:
        loss.backward()
    return {"forward": forward.sent(), "backward": backward.sent()}
