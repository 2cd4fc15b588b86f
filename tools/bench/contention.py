"""How much slower matrix products are beside a receive that waits: NCCL's receive is a kernel, which spins on some of a
GPU's multiprocessors until its message comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.over_nccl import RANKS, device_of_rank, way
from tools.bench.report import HOW


@dataclass(frozen=True)
class Sizes:
    """``count`` products of two matrices of ``width`` rows and columns in bf16, alone and beside a waiting receive of
    ``mebibytes`` MiB. A row that takes longer than ``limit`` seconds is ended as hung.

    Attributes:
        ctas: values of NCCL_MAX_CTAS, each in processes of its own; None for NCCL's choice. A CTA is a block of
            threads, which a multiprocessor runs.
    """

    device: str
    width: int = 8192
    mebibytes: int = 32
    count: int = 50
    ctas: tuple[int | None, ...] = (4, 16, None)
    limit: float = 25.0


CUDA = Sizes("cuda")
QUICK_CUDA = Sizes("cuda", width=1024, count=5)
QUICK = Sizes("cpu", width=64, mebibytes=1, count=5, ctas=(4, None), limit=120.0)

Times = tuple[list[float], list[float]]  # seconds of each product: alone, and beside a receive


def measure(sizes: Sizes) -> Iterator[Table]:
    """The table again with each row."""
    found = way(sizes.device)
    rows: list[list[Cell]] = []
    table = Table(
        f"A receive that waits, {found.words}: matrix products of {sizes.width} x {sizes.width} in bf16 beside it",
        {
            "NCCL_MAX_CTAS": "",
            HOW: "",
            "alone (ms)": ".3f",
            "beside a receive (ms)": ".3f",
            "added": ".1%",
        },
        rows,
        f"Medians of {sizes.count}. The message has {sizes.mebibytes} MiB, and is sent after the last product.",
    )
    for most in sizes.ctas:
        row: list[Cell] = ["NCCL's choice" if most is None else str(most), "", None, None, None]
        rows.append(row)
        if found.missing is not None:
            row[1] = f"not run: {found.missing}"
            yield table
            continue
        environment = {name: value for name, value in found.environment.items() if name != "NCCL_MAX_CTAS"}
        if most is not None:
            environment["NCCL_MAX_CTAS"] = str(most)
        row[1], ranks = processes.attempt(
            _times, RANKS, sizes, backend=found.backend, limit=sizes.limit, environment=environment
        )
        if ranks is not None:
            alone, beside = map(median, ranks[0])
            row[2:] = [1e3 * alone, 1e3 * beside, beside / alone - 1]
        yield table


def _times(sizes: Sizes) -> Times:
    """Rank 0 multiplies and receives, and returns its times. Rank 1 has nothing on its GPU before it sends: two
    processes that share a GPU take turns, which would be measured too."""
    device = device_of_rank(sizes.device)
    hosts = dist.new_group(backend="gloo")
    message = torch.zeros(sizes.mebibytes * 2**18, device=device)
    is_receiver = dist.get_rank() == 0
    if is_receiver:
        dist.recv(message[:1], 1)  # NCCL connects two ranks at their first message
    else:
        dist.send(message[:1], 0)
    found: Times = ([], [])
    if is_receiver:
        a, b = (torch.randn(sizes.width, sizes.width, device=device).bfloat16() for _ in range(2))
        product = torch.empty_like(a)
        # Loads the kernel. That waits for the whole device, so later it would wait for the receive.
        _seconds(a, b, product, sizes.count)
        alone = _seconds(a, b, product, sizes.count)
        receive = dist.irecv(message, 1)
        found = alone, _seconds(a, b, product, sizes.count)
        assert receive is not None
        dist.barrier(group=hosts)
        receive.wait()
    else:
        dist.barrier(group=hosts)
        dist.send(message, 0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found


def _seconds(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, count: int) -> list[float]:
    """Seconds of each product. On a GPU they are taken by events, since nothing may wait for the whole device while a
    receive waits."""
    found = []
    for _ in range(count):
        if a.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.mm(a, b, out=product)
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            since = time.perf_counter()
            torch.mm(a, b, out=product)
            found.append(time.perf_counter() - since)
    return found
