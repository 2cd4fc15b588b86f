"""The table at the start of a run: which rank is where, what it holds of the model, and the memory that it will need.

::

    rank  host   device  stage  layers                         parameters  memory expected
       0  node1  cpu         1  blocks.2 .. head (4 layers)       823,296         15.1 MiB
       1  node1  cpu         0  embed .. blocks.1 (3 layers)      840,192         18.4 MiB
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import optim

from lightning_parallel.ranks.collectives import gather_objects_on_first
from lightning_parallel.ranks.layout import AXES, Layout
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.ranks.run import Run
from lightning_parallel.settings import binary_size

_ROWS = 16  # a longer table is hard to read
_HELD = ("layers", "parameters", "memory expected", "gradients")  # the columns that say what a rank holds
_TO_THE_RIGHT = ("parameters", "memory expected", "outside PyTorch")

Row = dict[str, int | str]  # one rank's cells, by the titles of the columns


@dataclass(frozen=True)
class Holding:
    """What a rank holds of the model.

    Attributes:
        layers: in words.
        gradients: of an asynchronous pipeline: how late they are, in words.
        extra: bytes that it will hold in a training besides parameters, gradients and the optimizer's state:
            activations, copies of weights. None: not known, so the table says "at least".
    """

    layers: str
    gradients: str = ""
    extra: int | None = None


def tell(run: Run, holding: Holding, local: LocalModel, optimizers: Sequence[optim.Optimizer]) -> None:
    """Print the table of all ranks, given what this one holds. All ranks call it."""
    own = row(holding, run.layout, run.device, local, optimizers if run.trains else None)
    rows = gather_objects_on_first(own, None)
    if rows is not None:
        rank_zero_info(table(rows))


def row(
    holding: Holding,
    layout: Layout,
    device: torch.device,
    local: LocalModel,
    optimizers: Sequence[optim.Optimizer] | None,
) -> Row:
    """This rank's row. The optimizers are those of the training; None where nothing is trained."""
    parts = [local_part(parameter) for parameter in local.parameters.values()]
    sizes: list[int | None] = [part.nbytes for part in parts]
    if optimizers is None:
        sizes.append(None)  # there is no formula for what an evaluation computes
    else:
        sizes += [local_part(p).nbytes for p in local.parameters.values() if p.requires_grad]
        sizes += [holding.extra, *map(state_bytes, optimizers)]
    memory = ("at least " if None in sizes else "") + binary_size(sum(size or 0 for size in sizes))
    return {
        "rank": layout.rank,
        "host": socket.gethostname(),
        "device": str(device),
        # The slowest first, as in coordinates.
        **{axis.member: layout.index(axis.name) for axis in reversed(AXES) if layout.size(axis.name) > 1},
        "layers": holding.layers,
        "parameters": f"{sum(part.numel() for part in parts):,}",
        "memory expected": memory,
        "outside PyTorch": _outside_torch(device),
        "gradients": holding.gradients,
    }


def _outside_torch(device: torch.device) -> str:
    """What a GPU holds now outside PyTorch's allocator: CUDA's context, NCCL's buffers, other processes. Empty
    for a CPU."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return binary_size(total - free - torch.cuda.memory_reserved(device))


def state_bytes(optimizer: optim.Optimizer) -> int | None:
    """The bytes that torch's optimizers keep for their parameters, by their formulas; None for others."""
    total = 0
    for group in optimizer.param_groups:
        if isinstance(optimizer, optim.Adam | optim.NAdam | optim.RAdam | optim.Adamax | optim.Adadelta):
            copies = 2 + bool(group.get("amsgrad"))  # AdamW is an Adam
        elif isinstance(optimizer, optim.RMSprop):
            copies = 1 + bool(group["momentum"]) + bool(group["centered"])
        elif isinstance(optimizer, optim.Adagrad | optim.SGD):
            copies = int(isinstance(optimizer, optim.Adagrad) or bool(group["momentum"]))
        else:
            return None
        total += copies * sum(local_part(p).nbytes for p in group["params"] if p.requires_grad)
    return total


def table(rows: Sequence[Row]) -> str:
    """The rows, which are in the order of ranks, as text. In a long table, ranks that hold the same share a row."""
    alike: dict[object, list[Row]] = {}
    for each in rows:
        same = tuple(each[title] for title in _HELD) if len(rows) > _ROWS else each["rank"]
        alike.setdefault(same, []).append(each)
    columns = []
    for title, example in rows[0].items():
        cells = [_cell([each[title] for each in group]) for group in alike.values()]
        if any(cells):
            width = max(map(len, (title, *cells)))
            pad = str.rjust if isinstance(example, int) or title in _TO_THE_RIGHT else str.ljust
            columns.append([pad(cell, width) for cell in (title, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _cell(values: Sequence[int | str]) -> str:
    """One value; of several the first and the last, and how many there are."""
    found = list(dict.fromkeys(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} .. {found[-1]} ({len(found)})"
