"""``python -m recipes.gallery``: the README's pictures, from real runs of stages that sleep."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from lightning_parallel import AsyncPipelineStrategy, PipelineStrategy
from lightning_parallel.strategies.pipeline_base import PipelineBase
from recipes.bench import processes
from recipes.bench.layers import fit, sleeping

HERE = Path(__file__).parent
STAGES = 4
FORWARD, BACKWARD = 0.020, 0.040  # seconds
WIDTH = 512  # a microbatch is a float32 matrix of 1 MiB


def main() -> None:
    for name in ("gpipe", "async"):
        with TemporaryDirectory() as directory:
            processes.run(_train, STAGES, name, directory)
            shutil.copy(Path(directory) / "timeline.png", HERE / f"{name}.png")
        print(f"Written: {HERE / name}.png")


def _train(name: str, directory: str) -> None:
    layers = sleeping(dist.get_world_size(), FORWARD, BACKWARD)
    strategy: PipelineBase
    if name == "gpipe":
        strategy = PipelineStrategy(microbatches=8, balance="layers", timeline=True)
        batch, batches = torch.randn(8, WIDTH, WIDTH), 2
    else:
        strategy = AsyncPipelineStrategy(microbatches=1, balance="layers", timeline=True)
        batch, batches = torch.randn(1, WIDTH, WIDTH), 20
    fit(layers, strategy, batch, batches, default_root_dir=directory)


if __name__ == "__main__":
    main()
