"""terratorch: its tasks, with encoders of timm."""

from __future__ import annotations

from typing import Any

import torch
from terratorch.tasks import ClassificationTask, PixelwiseRegressionTask, SemanticSegmentationTask

from tests.others.data import classes, named, normal
from tests.others.entry import Entry

UNET = {
    "backbone": "timm_resnet18",
    "backbone_pretrained": False,
    "backbone_bands": ["RED", "GREEN", "BLUE"],
    "decoder": "UNetDecoder",
    "decoder_channels": [32, 16, 8, 8, 8],
    "necks": [],
}
CLASSES = {key: value for key, value in UNET.items() if not key.startswith("decoder")} | {"decoder": "IdentityDecoder"}


def entry(name: str, make: Any, loader: Any) -> Entry:
    return Entry(name, "terratorch", make, loader, validates=False, dtype=torch.float32)


ENTRIES = (
    entry("segmentation", lambda: SemanticSegmentationTask(UNET | {"num_classes": 3}, "EncoderDecoderFactory"),
          lambda size: named(size, image=normal(3, 64, 64), mask=classes(3, 64, 64))),
    entry("pixelwise regression", lambda: PixelwiseRegressionTask(dict(UNET), "EncoderDecoderFactory", loss="mse"),
          lambda size: named(size, image=normal(3, 64, 64), mask=normal(64, 64))),
    entry("classification", lambda: ClassificationTask(CLASSES | {"num_classes": 3}, "EncoderDecoderFactory"),
          lambda size: named(size, image=normal(3, 64, 64), label=classes(3))),
)  # fmt: skip
