"""How much memory microbatches in flight take under mixed precision: each keeps its activations, and casts of the
weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.contestants import Ours
from tools.bench.layers import blocks, mixed
from tools.bench.report import HOW, device_name

MIXED, TRUE = "bf16 autocast", "bf16 true"
_PEAK = {"cuda": "what torch has allocated", "cpu": "what autograd keeps, the parameters aside"}


@dataclass(frozen=True)
class Sizes:
    """``depth`` transformer blocks of ``width`` on one stage. In GPipe all ``microbatches`` of ``length`` tokens are in
    flight at once. A row that takes longer than ``limit`` seconds is ended as hung."""

    device: str
    width: int = 2048
    length: int = 512
    depth: int = 4
    microbatches: tuple[int, ...] = (1, 4, 8)
    limit: float = 30.0


CUDA = Sizes("cuda")
QUICK_CUDA = Sizes("cuda", width=256, length=128, depth=2, microbatches=(1, 3))
QUICK = Sizes("cpu", width=64, length=16, depth=2, microbatches=(1, 3), limit=120.0)


def measure(sizes: Sizes) -> Iterator[Table]:
    """The table again with each row."""
    where = device_name(sizes.device)
    rows: list[list[Cell]] = []
    weights = sum(parameter.numel() for parameter in blocks(sizes.depth, sizes.width).parameters())
    table = Table(
        f"Memory in flight, {where}: one stage, GPipe, {sizes.depth} blocks, d {sizes.width}, {sizes.length} tokens a "
        f"microbatch; the weights are {2 * weights / 2**20:.1f} MiB in bf16",
        {
            "precision": "",
            "microbatches": "d",
            HOW: "",
            "peak (MiB)": ".1f",
            "each further one (MiB)": ".1f",
        },
        rows,
        f"Peak: of {_PEAK[sizes.device]}. Each further one: beside the row with the fewest. What it has more "
        "under autocast is casts of weights.",
    )
    for precision in (MIXED, TRUE):
        fewest: float | None = None
        for count in sizes.microbatches:
            how, ranks = processes.attempt(_peak, 1, sizes, precision, count, limit=sizes.limit)
            row: list[Cell] = [precision, count, how, None, None]
            if ranks is not None:
                row[3] = ranks[0] / 2**20
                if fewest is None:
                    fewest, least = ranks[0], count
                else:
                    row[4] = (ranks[0] - fewest) / (count - least) / 2**20
            rows.append(row)
            yield table


def _peak(sizes: Sizes, precision: str, microbatches: int) -> int:
    """The most bytes that a second step holds at once."""
    device = torch.device(sizes.device)
    dtype = torch.bfloat16 if precision == TRUE else torch.float32
    torch.manual_seed(0)
    batch = torch.randn(microbatches, sizes.length, sizes.width, device=device, dtype=dtype)
    layers = blocks(sizes.depth, sizes.width).to(device, dtype)
    contestant = Ours(layers, "gpipe", batch, microbatches)
    with mixed(sizes.device) if precision == MIXED else nullcontext():
        contestant.step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            contestant.step()
            return torch.cuda.max_memory_allocated(device)
        kept = _Kept(layers)
        with saved_tensors_hooks(kept.pack, lambda packed: packed.tensor):
            contestant.step()
        return kept.most


class _Packed:
    """A tensor that autograd keeps as long as this."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Kept:
    """Counts the bytes that autograd keeps, of each piece of memory once, those of the parameters aside.

    Attributes:
        most: bytes at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.most = 0
        self._own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._alive: WeakSet[_Packed] = WeakSet()

    def pack(self, tensor: Tensor) -> _Packed:
        packed = _Packed(tensor)
        self._alive.add(packed)
        memory = {each.tensor.untyped_storage().data_ptr(): each.tensor.untyped_storage() for each in self._alive}
        self.most = max(self.most, sum(part.nbytes() for at, part in memory.items() if at not in self._own))
        return packed
