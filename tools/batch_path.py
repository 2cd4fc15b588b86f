"""``python -m tools.batch_path``: the library's functions that a batch passes, in the order in which it meets them.

A model of six small layers is trained in three stages on this machine's CPU. In one of its batches, long after the
first, each call of the library's is noted on one stage's own thread. Comprehensions and lambdas don't count.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

import lightning_parallel

STAGES, WIDTH, BATCH = 3, 16, 16
NOTED = 20  # the batch
PACKAGE = f"{Path(lightning_parallel.__file__).parent}{os.sep}"


class Chain(L.LightningModule):
    """Six linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class PathNoted(Callback):
    """Notes the calls within one batch."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # by file and function, in the order of the first calls

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == NOTED:
            sys.setprofile(self._note)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.calls[code.co_filename.removeprefix(PACKAGE), code.co_qualname] += 1


def train(rank: int, strategy: str, stage: int, port: int) -> None:
    """Train on one rank, which prints the path if it is this stage."""
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": STAGES}
    os.environ.update({name: str(value) for name, value in words.items()}, TORCHELASTIC_RUN_ID="path")
    torch.manual_seed(0)
    path = PathNoted()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=STAGES,
        strategy=strategy,
        max_steps=NOTED + 2,
        callbacks=[path],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Chain(), DataLoader(torch.randn((NOTED + 2) * BATCH, WIDTH), BATCH))  # type: ignore[arg-type]
    if trainer.strategy.layout.stage == stage:  # type: ignore[attr-defined]
        for (file, function), times in path.calls.items():
            print(f"{times:5} {file} {function}")
        print(f"{len(path.calls)} functions in {len({file for file, _ in path.calls})} files")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.batch_path", description=__doc__)
    parser.add_argument("--strategy", default="pipeline_1f1b", help="a registered name")
    parser.add_argument("--stage", type=int, default=1, choices=range(STAGES))
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(train, (given.strategy, given.stage, port), STAGES)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
