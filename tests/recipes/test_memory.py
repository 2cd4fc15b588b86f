"""A rank of a recipe's run needs memory for its own part of the model, from the start on."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_parallel import PipelineStrategy, TensorParallelStrategy
from recipes import build
from recipes.compare.measure import forget_peak, peak_resident, resident
from recipes.models.gpt import GPT
from tests.strategies.models import Rows
from tools.workers.pool import WorkerPool

MIB = 2**20
LAYERS, WIDTH, TIME, SAMPLES = 24, 512, 64, 4  # 290 MiB of parameters
UPDATES = 2


class Start(Callback):
    peak = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.peak = peak_resident()


def model(layers: int = LAYERS) -> GPT:
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 1e-3}
    return GPT(optimizer=optimizer, context=TIME, layers=layers, width=WIDTH, heads=8)


def saved_by_a_layer() -> int:
    """Bytes that autograd keeps of a block's forward with one sample, without its parameters."""
    block = model(layers=1).blocks[0]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(torch.ones(1, TIME, WIDTH))
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    del output
    return sum(size for place, size in kept.items() if place not in own)


def memory(tensor: bool, precision: Any) -> tuple[int, int, int, int]:
    """Bytes above those of the process without a model: until training begins, and until it ends; and of this rank's
    parameters, and of the largest."""
    # What is freed is given back at once: otherwise the C library keeps some, and how much depends on earlier tests.
    ctypes.CDLL(None).mallopt(-3, MIB)  # M_MMAP_THRESHOLD, <malloc.h>
    rows = [(torch.arange(TIME), torch.arange(TIME))] * SAMPLES * UPDATES
    strategy = TensorParallelStrategy() if tensor else PipelineStrategy(microbatches=SAMPLES)
    start = Start()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[start],
        precision=precision,
    )  # fmt: skip
    gc.collect()
    forget_peak()
    before = resident()
    with build.disk_offload(trainer):
        module = model()
    trainer.fit(module, DataLoader(Rows(rows), batch_size=SAMPLES))
    parameters = [p.nbytes for p in strategy.local_model.parameters.values()]
    return start.peak - before, peak_resident() - before, sum(parameters), max(parameters)


@pytest.mark.thorough  # bytes of parameters, gradients and states: tests/planning/test_memory.py
@pytest.mark.parametrize(("ranks", "tensor", "precision"), [
    (2, False, "32-true"), (4, False, "32-true"), (2, True, "32-true"), (2, False, "bf16-true"),
])  # fmt: skip
def test_a_rank_needs_memory_for_its_own_part(pool: WorkerPool, ranks: int, tensor: bool, precision: Any) -> None:
    (layer,) = pool.run(saved_by_a_layer, 1, init=False)  # in float32
    reports = pool.run(memory, ranks, tensor, precision, init=False)
    for stage, (start, whole, parameters, largest) in enumerate(reversed(reports)):
        layers = LAYERS * SAMPLES if tensor else LAYERS // ranks * min(ranks - stage, SAMPLES)
        # Parameters, gradients and two moments; what 1F1B holds; what AdamW computes of one parameter.
        share = 4 * parameters + layers * layer + 2 * largest
        connections = 40 * MIB  # and what torch loads when it is first used
        assert start < 1.15 * parameters + connections + 64 * MIB
        assert whole < 1.15 * share + connections, (stage, whole / share)
