"""Saving and opening a checkpoint, beside torch's distributed checkpoint alone, in turns."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from lightning_parallel.checkpoint import PlainOnDemand, format
from lightning_parallel.checkpoint.format import save
from lightning_parallel.checkpoint.keys import OptimizerState
from lightning_parallel.checkpoint.slices import on_host
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.rounds import middle, ratios

Seconds = dict[str, list[float]]  # of each round, by contestant


@dataclass(frozen=True)
class Sizes:
    """A model with Adam's state, in float32, shared out over ranks."""

    ranks: int = 4
    megabytes: int = 400
    tensors: int = 48  # parameters; with Adam's state three times as many
    rounds: int = 7


QUICK = Sizes(megabytes=4, tensors=6, rounds=1)


def measure(sizes: Sizes) -> list[Table]:
    rows: list[list[Cell]] = []
    for layout in ("stages", "replicas"):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            seconds = processes.run(_seconds, sizes.ranks, sizes, layout == "replicas", Path(folder))[0]
        for verb in ("save", "open"):
            ours, theirs = seconds[f"ours, {verb}"], seconds[f"torch, {verb}"]
            compared = ratios(ours, theirs)
            rows.append([layout, verb, median(ours), median(theirs), median(compared), middle(compared, 2)])
        stall = seconds["ours, copy"]
        compared = ratios(stall, seconds["torch, save"])
        times = [median(stall), median(seconds["torch, save"]), median(compared)]
        rows.append([layout, "save in the background: the stall", *times, middle(compared, 2)])
    return [
        Table(
            f"Checkpoints of {sizes.megabytes} MB, {sizes.ranks} ranks on one disk",
            {"ranks hold": "", "": "", "ours (s)": ".3f", "torch (s)": ".3f", "ours / torch": ".2f", "quartiles": ""},
            rows,
            "torch: torch.distributed.checkpoint.save and load of the same tensors, with the same fsync. Ours also "
            "agrees on names and groups, compares copies, writes trainer.pt, and renames; opening compares checksums.",
        )
    ]


def _seconds(sizes: Sizes, replicas: bool, folder: Path) -> Seconds:
    warnings.filterwarnings("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = sizes.megabytes * 10**6 // 4 // 3 // sizes.tensors
    names = [f"layer{i}.weight" for i in range(sizes.tensors) if replicas or i % ranks == rank]
    model = {name: torch.ones(each) for name in names}
    state = {name: {"exp_avg": torch.ones(each), "exp_avg_sq": torch.ones(each)} for name in names}
    optimizer = OptimizerState(state, [{"lr": 0.1, "params": names}])
    flat: dict[str, Tensor] = dict(model)
    flat |= {f"{name}.{key}": tensor for name, of_one in state.items() for key, tensor in of_one.items()}
    contestants: dict[str, Callable[[], object]] = {
        "ours, save": lambda: save(
            folder / "ours", model=model, optimizers=[optimizer], trainer={}, rank_state={}, coordinate=f"pp{rank}"
        ),
        "torch, save": lambda: torch_save(flat, checkpoint_id=folder / "torch"),
        "ours, open": lambda: _open(folder / "ours", model, f"pp{rank}"),
        "torch, open": lambda: torch_load(flat, checkpoint_id=folder / "torch"),
        "ours, copy": lambda: [on_host(tensor) for tensor in flat.values()],
    }
    seconds: Seconds = {name: [] for name in contestants}
    for number in range(sizes.rounds + 1):
        for name, run in contestants.items():
            if "save" in name and rank == 0:
                shutil.rmtree(folder / name.split(",")[0], ignore_errors=True)
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def _open(path: Path, model: dict[str, Tensor], coordinate: str) -> None:
    content = PlainOnDemand(path)
    format.load(content.reader, content.saved, path, model, model, coordinate)
