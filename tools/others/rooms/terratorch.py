"""terratorch: its tasks for images of the earth, with encoders of timm."""

from __future__ import annotations

from typing import Any

from terratorch.tasks import ClassificationTask, PixelwiseRegressionTask, SemanticSegmentationTask

from tools.others.data import classes, named, normal
from tools.others.entry import Entry

MODEL = {"backbone": "timm_resnet18", "backbone_pretrained": False, "backbone_out_indices": [1, 2, 3, 4]}


def images(*target: Any) -> Any:
    return lambda batch_size: named(batch_size, image=normal(3, 64, 64), **dict(target))


def entry(name: str, kind: Any, target: tuple[str, Any], model: dict[str, Any], **settings: Any) -> Entry:
    def make() -> Any:
        return kind(model_factory="EncoderDecoderFactory", model_args={**MODEL, **model}, freeze_backbone=False,
                    **settings)  # fmt: skip

    return Entry(name, "terratorch", make, images(target), validates=False)


ENTRIES = (
    entry("segmentation", SemanticSegmentationTask, ("mask", classes(3, 64, 64)),
          {"decoder": "UNetDecoder", "decoder_channels": [16, 8, 8, 8], "num_classes": 3}, loss="ce",
          ignore_index=-1),
    entry("regression of pixels", PixelwiseRegressionTask, ("mask", normal(64, 64)),
          {"decoder": "FCNDecoder", "decoder_channels": 8}, loss="mse"),
    entry("classification", ClassificationTask, ("label", classes(3)),
          {"decoder": "IdentityDecoder", "num_classes": 3}, loss="ce"),
)  # fmt: skip
