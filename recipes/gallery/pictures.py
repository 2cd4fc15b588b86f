"""The timelines on the pages, from real runs of stages that sleep."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel import AsyncPipelineStrategy, PipelineStrategy
from lightning_parallel.strategies.staged import StagedStrategy
from recipes import ROOT
from recipes.bench import processes
from recipes.bench.layers import fit, sleeping

PICTURES = ROOT / "docs" / "pictures"
STAGES = 4
FORWARD, BACKWARD = 0.020, 0.040  # seconds
WIDTH = 512  # a microbatch is a float32 matrix of 1 MiB


def draw(directory: Path = PICTURES, stages: int = STAGES) -> None:
    """Write a picture of each schedule into ``directory``."""
    for name in ("gpipe", "interleaved", "zbv", "async"):
        with TemporaryDirectory() as scratch:
            processes.run(_train, stages, name, scratch)
            shutil.copy(Path(scratch) / "timeline.png", directory / f"{name}.png")
        print(f"Written: {directory / name}.png")


def _train(name: str, scratch: str) -> None:
    chunks = 2 if name in ("interleaved", "zbv") else 1
    layers = sleeping(chunks * dist.get_world_size(), FORWARD / chunks, BACKWARD / chunks)
    strategy: StagedStrategy
    if name != "async":
        schedule: Any = name
        strategy = PipelineStrategy(schedule=schedule, microbatches=8, balance="layers", timeline=True)
        batch, batches = torch.randn(8, WIDTH, WIDTH), 2
    else:
        strategy = AsyncPipelineStrategy(microbatches=1, correction=None, balance="layers", timeline=True)
        batch, batches = torch.randn(1, WIDTH, WIDTH), 20
    fit(layers, strategy, batch, batches, directory=scratch)
