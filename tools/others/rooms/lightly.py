"""lightly: its examples for PyTorch Lightning, with a backbone of three layers."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as L
import torch
from lightly import loss as losses
from lightly.models import modules as heads
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tools.others.entry import SAMPLES, Entry

WIDTH = 16


def backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip


class Views(Dataset):
    """As LightlyDataset gives them: views, a label, and a file's name."""

    def __init__(self, count: int = 2) -> None:
        self.views = [torch.randn(SAMPLES, 3, 16, 16) for _ in range(count)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return [view[index] for view in self.views], index % 3, f"{index}.png"


class Learner(L.LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


class SimCLR(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = heads.SimCLRProjectionHead(WIDTH, WIDTH, 8)
        self.criterion = losses.NTXentLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        (x0, x1), _, _ = batch
        loss = self.criterion(self.forward(x0), self.forward(x1))
        self.log("train_loss", loss)
        return loss


class BarlowTwins(SimCLR):
    def __init__(self) -> None:
        super().__init__()
        self.projection_head = heads.BarlowTwinsProjectionHead(WIDTH, WIDTH, WIDTH)
        self.criterion = losses.BarlowTwinsLoss()


class VICReg(SimCLR):
    def __init__(self) -> None:
        super().__init__()
        self.projection_head = heads.BarlowTwinsProjectionHead(WIDTH, WIDTH, WIDTH)
        self.criterion = losses.VICRegLoss()


class SimSiam(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = heads.SimSiamProjectionHead(WIDTH, WIDTH, 8)
        self.prediction_head = heads.SimSiamPredictionHead(8, 4, 8)
        self.criterion = losses.NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Any:
        z = self.projection_head(self.backbone(x).flatten(start_dim=1))
        return z.detach(), self.prediction_head(z)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x0, x1) = batch[0]
        z0, p0 = self.forward(x0)
        z1, p1 = self.forward(x1)
        return 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))


class BYOL(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = heads.BYOLProjectionHead(WIDTH, WIDTH, 8)
        self.prediction_head = heads.BYOLPredictionHead(8, WIDTH, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = losses.NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        return self.prediction_head(self.projection_head(self.backbone(x).flatten(start_dim=1)))

    def forward_momentum(self, x: Tensor) -> Tensor:
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        (x0, x1) = batch[0]
        p0, z0 = self.forward(x0), self.forward_momentum(x0)
        p1, z1 = self.forward(x1), self.forward_momentum(x1)
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))


class MoCo(BYOL):
    def __init__(self) -> None:
        super().__init__()
        self.projection_head = heads.MoCoProjectionHead(WIDTH, WIDTH, 8)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.projection_head_momentum)
        del self.prediction_head
        self.criterion = losses.NTXentLoss(memory_bank_size=(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x_query, x_key = batch[0]
        return self.criterion(self.forward(x_query), self.forward_momentum(x_key))


class SwaV(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = heads.SwaVProjectionHead(WIDTH, WIDTH, 8)
        self.prototypes = heads.SwaVPrototypes(8, n_prototypes=12)
        self.criterion = losses.SwaVLoss()

    def forward(self, x: Tensor) -> Tensor:
        x = self.projection_head(self.backbone(x).flatten(start_dim=1))
        return self.prototypes(nn.functional.normalize(x, dim=1, p=2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.prototypes.normalize()
        crops = [self.forward(x) for x in batch[0]]
        return self.criterion(crops[:2], crops[2:])


class DINO(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.student_backbone = backbone()
        self.student_head = heads.DINOProjectionHead(WIDTH, WIDTH, 8, 12, freeze_last_layer=1)
        self.teacher_backbone = copy.deepcopy(self.student_backbone)
        self.teacher_head = heads.DINOProjectionHead(WIDTH, WIDTH, 8, 12)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = losses.DINOLoss(output_dim=12, warmup_teacher_temp_epochs=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.student_head(self.student_backbone(x).flatten(start_dim=1))

    def forward_teacher(self, x: Tensor) -> Tensor:
        return self.teacher_head(self.teacher_backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.student_backbone, self.teacher_backbone, m=momentum)
        update_momentum(self.student_head, self.teacher_head, m=momentum)
        views = batch[0]
        teacher_out = [self.forward_teacher(view) for view in views[:2]]
        student_out = [self.forward(view) for view in views]
        return self.criterion(teacher_out, student_out, epoch=self.current_epoch)

    def on_after_backward(self) -> None:
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)


def entry(name: str, kind: type[L.LightningModule], views: int = 2) -> Entry:
    return Entry(name, "lightly", kind, lambda size: DataLoader(Views(views), size), validates=False)


ENTRIES = (
    entry("simclr", SimCLR),
    entry("barlow twins", BarlowTwins),
    entry("vicreg", VICReg),
    entry("simsiam", SimSiam),
    entry("byol", BYOL),
    entry("moco", MoCo),
    entry("swav", SwaV, 4),
    entry("dino", DINO, 4),
)
