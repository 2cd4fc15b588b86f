"""The step of an optimizer where ranks divide the parameters: of Muon, whose whole matrices go to owners, beside the
same arithmetic spread evenly over the ranks; of AdamW, which steps parts, beside a step that nothing is around."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_parallel as lp
from recipes.tables import Cell, Table
from tools.bench import processes
from tools.bench.rounds import in_turn, middle, ratios

STEP, ARITHMETIC, MESSAGES, BARE = "step", "arithmetic", "messages", "bare step"
RANKS = 2
STRATEGIES: dict[str, Callable[[], Any]] = {
    "tensor parallel": partial(lp.TensorParallelStrategy, tensor_parallel=RANKS),
    "fully sharded": lp.FullyShardedStrategy,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"Muon": torch.optim.Muon, "AdamW": torch.optim.AdamW}


@dataclass(frozen=True)
class Sizes:
    """``matrices`` square ones of ``width``, an even number; ``rounds`` of a step of each contestant."""

    matrices: int = 8
    width: int = 512
    rounds: int = 20


QUICK = Sizes(4, 64, 4)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


class _Model(L.LightningModule):
    def __init__(self, sizes: Sizes, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.layers = nn.ModuleList(_Layer(sizes.width) for _ in range(sizes.matrices // 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"layers.*.up": "column", "layers.*.down": "row"}

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters(), lr=1e-4)


class _Clock(Callback):
    """Times further steps by the gradients of each batch, in turn with what they are beside."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.contestants: list[tuple[str, Callable[[], Any]]] = []
        self.seconds: dict[str, list[float]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        optimizer = trainer.optimizers[0]
        self.contestants = self.contestants or [(STEP, optimizer.step), *_beside(self.sizes, optimizer)]
        for name, contestant in in_turn(self.contestants, trainer.global_step):
            dist.barrier()
            begin = time.perf_counter()
            contestant()
            self.seconds.setdefault(name, []).append(time.perf_counter() - begin)


def _beside(sizes: Sizes, optimizer: torch.optim.Optimizer) -> list[tuple[str, Callable[[], Any]]]:
    if not isinstance(optimizer, torch.optim.Muon):
        return [(BARE, partial(type(optimizer).step, optimizer))]
    own = [nn.Parameter(torch.randn(sizes.width, sizes.width)) for _ in range(sizes.matrices // RANKS)]
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    # Each rank has a half of each matrix: to each owner goes a half of what it owns, and the same comes back.
    message = torch.randn(sizes.matrices * sizes.width**2 // RANKS)
    received = torch.empty_like(message)

    def exchange() -> None:
        dist.all_to_all_single(received, message)
        dist.all_to_all_single(message, received)

    return [(ARITHMETIC, torch.optim.Muon(own, lr=1e-4).step), (MESSAGES, exchange)]


def measure(sizes: Sizes) -> list[Table]:
    rows: list[list[Cell]] = []
    for layout in STRATEGIES:
        for optimizer in OPTIMIZERS:
            ranks = processes.run(_times, RANKS, sizes, layout, optimizer)
            slower = {name: [*map(max, *(rank[name] for rank in ranks))] for name in ranks[0]}
            step = slower.pop(STEP)
            ratio = ratios(step, [sum(parts) for parts in zip(*slower.values(), strict=True)])
            beside, messages = slower.get(BARE) or slower.get(ARITHMETIC), slower.get(MESSAGES)
            times = [1e3 * median(seconds) if seconds else None for seconds in (step, beside, messages)]
            rows.append([layout, optimizer, *times, median(ratio), middle(ratio)])
    return [
        Table(
            f"Steps of optimizers, {RANKS} ranks: {sizes.matrices} matrices of {sizes.width} x {sizes.width}",
            {
                "layout": "",
                "optimizer": "",
                "step (ms)": ".2f",
                "beside (ms)": ".2f",
                "messages (ms)": ".2f",
                "ratio": ".3f",
                "middle half": "",
            },
            rows,
            f"The slower rank's, medians of {sizes.rounds}, in turn. Beside: for Muon its own step of whole matrices "
            "spread evenly over the ranks, to which the messages of as many bytes are added; for AdamW the same step "
            "without what strategies put around steps. Ratio: of the step to their sum, within a round.",
        )
    ]


def _times(sizes: Sizes, layout: str, optimizer: str) -> dict[str, list[float]]:
    clock = _Clock(sizes)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=STRATEGIES[layout](),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    batches = torch.randn(1 + sizes.rounds, 8, sizes.width)
    trainer.fit(_Model(sizes, optimizer), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {name: seconds[1:] for name, seconds in clock.seconds.items()}
