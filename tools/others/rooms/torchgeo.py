"""torchgeo: its trainers, on random images."""

from __future__ import annotations

from typing import Any

from torchgeo.trainers import (
    BYOLTask,
    ChangeDetectionTask,
    ClassificationTask,
    MoCoTask,
    MultiLabelClassificationTask,
    RegressionTask,
    SemanticSegmentationTask,
    SimCLRTask,
)

from tools.others.data import classes, named, normal
from tools.others.entry import Entry


def labelled(batch_size: int) -> Any:
    return named(batch_size, image=normal(3, 32, 32), label=classes(3))


def masked(batch_size: int) -> Any:
    return named(batch_size, image=normal(3, 64, 64), mask=classes(3, 64, 64))


def entry(name: str, make: Any, loader: Any = labelled, **settings: Any) -> Entry:
    return Entry(name, "torchgeo", make, loader, **settings)


ENTRIES = (
    entry("classification", lambda: ClassificationTask("resnet18", num_classes=3)),
    entry("multi-label", lambda: MultiLabelClassificationTask("resnet18", num_classes=3, loss="bce"),
          lambda size: named(size, image=normal(3, 32, 32), label=classes(2, 3))),
    entry("regression", lambda: RegressionTask("resnet18", num_outputs=1),
          lambda size: named(size, image=normal(3, 32, 32), label=normal(1))),
    entry("segmentation", lambda: SemanticSegmentationTask("unet", "resnet18", num_classes=3), masked),
    entry("change detection", lambda: ChangeDetectionTask("unet", "resnet18", in_channels=3),
          lambda size: named(size, image=normal(2, 3, 64, 64), mask=classes(2, 1, 64, 64))),
    entry("simclr", lambda: SimCLRTask("resnet18", hidden_dim=16, output_dim=8, memory_bank_size=0)),
    entry("moco", lambda: MoCoTask("resnet18", hidden_dim=16, output_dim=8, memory_bank_size=0)),
    entry("byol", lambda: BYOLTask("resnet18")),
)  # fmt: skip
