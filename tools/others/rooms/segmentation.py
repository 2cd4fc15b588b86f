"""segmentation-models-pytorch: the module of its example notebooks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import segmentation_models_pytorch as smp
import torch
from torch import Tensor

from tools.others.data import classes, named, normal
from tools.others.entry import Entry


class PetModel(L.LightningModule):
    """examples/binary_segmentation_intro.ipynb"""

    def __init__(self, arch: str, encoder_name: str, in_channels: int, out_classes: int, **kwargs: Any) -> None:
        super().__init__()
        self.model = smp.create_model(
            arch, encoder_name, encoder_weights=None, in_channels=in_channels, classes=out_classes, **kwargs
        )
        self.register_buffer("std", torch.tensor([0.2, 0.2, 0.2]).view(1, 3, 1, 1))
        self.register_buffer("mean", torch.tensor([0.5, 0.5, 0.5]).view(1, 3, 1, 1))
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.training_step_outputs: list[Any] = []
        self.validation_step_outputs: list[Any] = []

    def forward(self, image: Tensor) -> Tensor:
        return self.model((image - self.mean) / self.std)

    def shared_step(self, batch: Any, stage: str) -> Any:
        image, mask = batch["image"], batch["mask"]
        assert image.ndim == 4
        h, w = image.shape[2:]
        assert h % 32 == 0 and w % 32 == 0
        assert mask.ndim == 4
        assert mask.max() <= 1.0 and mask.min() >= 0
        logits_mask = self.forward(image)
        loss = self.loss_fn(logits_mask, mask)
        pred_mask = (logits_mask.sigmoid() > 0.5).float()
        tp, fp, fn, tn = smp.metrics.get_stats(pred_mask.long(), mask.long(), mode="binary")
        return {"loss": loss, "tp": tp, "fp": fp, "fn": fn, "tn": tn}

    def shared_epoch_end(self, outputs: list[Any], stage: str) -> None:
        tp, fp, fn, tn = (torch.cat([x[key] for x in outputs]) for key in ("tp", "fp", "fn", "tn"))
        per_image_iou = smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro-imagewise")
        dataset_iou = smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro")
        self.log_dict({f"{stage}_per_image_iou": per_image_iou, f"{stage}_dataset_iou": dataset_iou}, prog_bar=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        train_loss_info = self.shared_step(batch, "train")
        self.training_step_outputs.append(train_loss_info)
        return train_loss_info

    def on_train_epoch_end(self) -> None:
        self.shared_epoch_end(self.training_step_outputs, "train")
        self.training_step_outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        valid_loss_info = self.shared_step(batch, "valid")
        self.validation_step_outputs.append(valid_loss_info)
        return valid_loss_info

    def on_validation_epoch_end(self) -> None:
        self.shared_epoch_end(self.validation_step_outputs, "valid")
        self.validation_step_outputs.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


class CamVidModel(PetModel):
    """examples/camvid_segmentation_multiclass.ipynb, without metrics"""

    def __init__(self) -> None:
        super().__init__("fpn", "mobilenet_v2", 3, 4)
        self.loss_fn = torch.nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_fn(self.forward(batch["image"]), batch["label"])

    validation_step = training_step

    def on_train_epoch_end(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...


def pets(batch_size: int) -> Any:
    return named(batch_size, image=normal(3, 64, 64), mask=classes(2, 1, 64, 64), label=classes(4, 64, 64))


ENTRIES = (
    Entry("unet, dice", "segmentation-models-pytorch", lambda: PetModel("unet", "resnet18", 3, 1), pets),
    Entry("fpn, cross-entropy", "segmentation-models-pytorch", CamVidModel, pets),
)
