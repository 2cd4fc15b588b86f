"""A folder of safetensors in the memory of several ranks, each with its own part, beside reading as many bytes."""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_parallel import PipelineStrategy, TensorParallelStrategy
from lightning_parallel.strategies.base import LayoutStrategy
from recipes.build import disk_offload
from recipes.models.hf import CausalLM
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.layers import quiet
from tools.bench.rounds import in_turn, middle, ratios

_NARROW = 64  # the width of a model that has as many layers and next to no bytes
_A_PAGE = mmap.PAGESIZE // 4  # float32 numbers in a page


@dataclass(frozen=True)
class Sizes:
    """A Llama of transformers in float32: 1.9 GB in four files."""

    layers: int = 28
    width: int = 1024
    vocabulary: int = 8192
    ranks: int = 4
    rounds: int = 5


QUICK = Sizes(layers=4, width=128, vocabulary=64, rounds=1)

_STRATEGIES: Mapping[str, Callable[[], LayoutStrategy]] = {
    "pipeline": lambda: PipelineStrategy(microbatches=4),
    "tensor": TensorParallelStrategy,
}


def measure(sizes: Sizes) -> list[Table]:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        large, narrow = Path(scratch, "large"), Path(scratch, "narrow")
        nbytes = _save(large, sizes)
        _save(narrow, replace(sizes, width=_NARROW))
        runs = {"read": partial(processes.run, _read, sizes.ranks, large)}
        for name in _STRATEGIES:
            runs[name] = partial(processes.run, _opened, sizes.ranks, large, name)
            runs[f"{name}, narrow"] = partial(processes.run, _opened, sizes.ranks, narrow, name)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(sizes.rounds):
            for name in in_turn([*runs], turn):
                seconds[name].append(max(runs[name]()))
    rows: list[list[Cell]] = []
    for name in _STRATEGIES:
        whole, rest = seconds[name], seconds[f"{name}, narrow"]
        loading = [a - b for a, b in zip(whole, rest, strict=True)]
        compared = ratios(loading, seconds["read"])
        rows.append([name, median(whole), median(rest), median(seconds["read"]), median(compared), middle(compared, 2)])
    return [
        Table(
            f"A folder of {nbytes / 1e9:.1f} GB, {sizes.ranks} ranks",
            {
                "strategy": "",
                "until training (s)": ".2f",
                "of a narrow model": ".2f",
                "reading (s)": ".2f",
                "loading / reading": ".2f",
                "middle half": "",
            },
            rows,
            f"From the folder until a rank's part is in its memory, the slowest rank; the same for a model with as "
            f"many layers of width {_NARROW}: what isn't loading; each rank reads its share of the bytes. Files are in "
            f"the page cache. Medians of {sizes.rounds} rounds, in turn.",
        )
    ]


def _save(folder: Path, sizes: Sizes) -> int:
    """Make the model's folder. Returns the bytes of its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=4 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _read(folder: Path) -> float:
    """Seconds in which this rank reads its share of the files' bytes into memory."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        begin, end = (file.stat().st_size * i // ranks for i in (rank, rank + 1))
        into = memoryview(bytearray(end - begin))
        with file.open("rb", buffering=0) as source:
            source.seek(begin)
            while into:
                into = into[source.readinto(into) :]
    return time.perf_counter() - start


class _InMemory(L.Callback):
    """When this rank has its part in memory: it lies in mapped files, so a number of each page is read."""

    def __init__(self) -> None:
        self.at = 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, LayoutStrategy)
        for parameter in trainer.strategy.local_model.parameters.values():
            parameter.detach().view(-1)[::_A_PAGE].sum()
        self.at = time.perf_counter()


def _opened(folder: Path, name: str) -> float:
    """Seconds until this rank has its part of the folder's model in memory, and could train it."""
    quiet()
    torch.manual_seed(0)
    in_memory = _InMemory()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=_STRATEGIES[name](),
        max_steps=1,
        callbacks=[in_memory],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = [(torch.randint(64, (4,)), torch.randint(64, (4,))) for _ in range(4)]
    dist.barrier()
    start = time.perf_counter()
    with disk_offload(trainer):
        module = CausalLM(path=str(folder), optimizer={"_target_": "torch.optim.SGD", "lr": 0.1})
    trainer.fit(module, DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    return in_memory.at - start
