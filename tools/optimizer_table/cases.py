"""The model, the optimizers and the layouts of the table."""

from __future__ import annotations

import os
import pydoc
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import lightning_parallel as lp
from tools.optimizer_table import optimizers
from tools.zoo.training import QUIET, Report, Witness, collect

BATCH, SAMPLES = 8, 20  # the last batch of 4 is shared, too
EPOCHS, UPDATES = 4, 12
CLIP = 0.5
PLAN = {"blocks.*.up": "column", "blocks.*.down": "row", "head": "column_gather"}
STAGES: dict[str, Any] = {"stages": 2, "microbatches": 2}
STRATEGIES: dict[str, type[Strategy]] = {
    "sync": lp.PipelineStrategy,
    "async": lp.AsyncPipelineStrategy,
    "tensor": lp.TensorParallelStrategy,
    "fsdp": lp.FullyShardedStrategy,
}
FULLY = {"data_parallel_kind": "fully_shard"}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tensor": (2, "tensor", {}),
    "tensor x data": (4, "tensor", {"tensor_parallel": 2, "data_parallel": 2}),
    "fully sharded": (2, "fsdp", {}),
    "stages": (2, "sync", STAGES),
    "stages x tensor": (4, "sync", {**STAGES, "tensor_parallel": 2}),
    "stages x fully sharded": (4, "sync", {**STAGES, "data_parallel": 2, **FULLY}),
    "fully sharded x tensor": (
        4,
        "sync",
        {"stages": 1, "data_parallel": 2, "tensor_parallel": 2, "microbatches": 2, **FULLY},
    ),
    "late stages": (2, "async", STAGES),
    "late stages x tensor": (4, "async", {**STAGES, "tensor_parallel": 2}),
}
ELEMENTWISE = [
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
]  # fmt: skip
BY_PARAMETER = ["Muon", "Adafactor", "LARS", "LAMB", "HostLAMB", "Kronecker", "SOAP", "FloorSGD", "Lookahead"]
BY_ALL = ["Prodigy", "SAM", "LBFGS"]
# Of the package pytorch_optimizer.
PACKAGED = [
    "pytorch_optimizer.Lion", "pytorch_optimizer.Adan", "pytorch_optimizer.ScheduleFreeAdamW",
    "pytorch_optimizer.AdaBelief", "pytorch_optimizer.MARS", "pytorch_optimizer.Lamb", "pytorch_optimizer.LARS",
    "pytorch_optimizer.Shampoo", "pytorch_optimizer.ScalableShampoo", "pytorch_optimizer.CAME",
    "pytorch_optimizer.AdaFactor",
]  # fmt: skip
PACKAGED_BY_ALL = ["pytorch_optimizer.Kron", "pytorch_optimizer.Prodigy", "pytorch_optimizer.DAdaptAdam"]
TRAINED = {("Prodigy", "fully sharded"), ("SAM", "fully sharded")}  # of BY_ALL: by their operations on DTensors


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(25, 15), nn.Linear(15, 25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(L.LightningModule):
    """Ranks divide matrices and vectors unequally, and leave others whole; one frozen, one unused. Seeded weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 25))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(25, 10)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.get_parameter("blocks.1.up.weight").requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].flatten(1)[:, :25] * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_tensor_parallel(self) -> dict[str, str]:
        return PLAN

    @classmethod
    def samples(cls) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
        labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
        return list(zip(images, labels, strict=True))

    @classmethod
    def loader(
        cls, shuffle: bool = False, batch_size: int = BATCH, samples: int = SAMPLES, share: Any = None
    ) -> DataLoader[Any]:
        """``share``: which replica's samples, as DistributedSampler's arguments (Lightning's own would be shuffled)."""
        rows: Any = cls.samples()[:samples]
        if share is None:
            return DataLoader(rows, batch_size=batch_size, shuffle=shuffle)
        return DataLoader(rows, batch_size=batch_size, sampler=DistributedSampler(rows, **share, shuffle=shuffle))


def made(kind: str, parameters: list[nn.Parameter]) -> Optimizer:
    """In two groups, of which the first decays."""
    groups: list[dict[str, Any]] = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2]}]
    if kind == "LBFGS":
        return torch.optim.LBFGS(parameters, lr=0.01)  # it takes one group
    if kind == "Lookahead":
        return optimizers.Lookahead(optimizers.LAMB(groups, lr=0.01))
    if kind == "SAM":
        return optimizers.SAM(groups, torch.optim.SGD, lr=0.01)
    if "." in kind:
        packaged: Optimizer = pydoc.locate(kind)(groups, lr=0.01)  # type: ignore[operator]
        getattr(packaged, "train", lambda: None)()  # those that are schedule-free
        return packaged
    options = {"eps": 1e-4} if kind.startswith(("Ad", "NAd", "RAd", "RMS")) and kind != "Adafactor" else {}
    optimizer: Optimizer = (getattr(optimizers, kind, None) or getattr(torch.optim, kind))(groups, lr=0.01, **options)
    return optimizer


def by(kind: str) -> type[Net]:
    """The model with another optimizer, whose rate falls."""

    def configure_optimizers(self: Net) -> Any:
        optimizer = made(kind, [p for p in self.parameters() if p.ndim == 2 or kind != "Muon"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return type(f"{kind}Net", (Net,), {"configure_optimizers": configure_optimizers})


def fit(
    kind: str,
    strategy: str,
    options: dict[str, Any] | None = None,
    replicas: int = 1,
    *,
    report: Report | None = None,
    callbacks: Sequence[Callback] = (),
    **given: Any,
) -> Report:
    """Twelve updates.

    Args:
        strategy: "single", or one of STRATEGIES, on all ranks.
        options: of its constructor.
        report: is filled; None for a new one.
        given: more settings of the Trainer.
    """
    torch.set_default_dtype(torch.float64)
    module, report = by(kind)(), report or Report()
    settings: dict[str, Any] = {
        **QUIET, "max_epochs": EPOCHS, "gradient_clip_val": CLIP, "num_sanity_val_steps": 0, "devices": 1,
    }  # fmt: skip
    if strategy != "single":
        made = STRATEGIES[strategy](**options or {})
        settings |= {"devices": int(os.environ["WORLD_SIZE"]), "strategy": made}
    trainer = L.Trainer(**(settings | given), callbacks=[Witness(report), *callbacks])
    share = trainer.distributed_sampler_kwargs if replicas > 1 else None
    trainer.fit(module, module.loader(batch_size=BATCH // replicas, share=share), module.loader())
    collect(report, trainer, module)
    return report


def replicas_of(layout: str) -> int:
    return 2 if "data" in layout or "fully" in layout else 1
