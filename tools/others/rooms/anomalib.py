"""anomalib: its models that need no pretrained weights."""

from __future__ import annotations

from typing import Any

import torch
from anomalib.data import ImageBatch, ImageItem
from anomalib.models import Cflow, Fastflow, Ganomaly, ReverseDistillation

from tools.others.entry import SAMPLES, Entry

BARE = {"post_processor": False, "evaluator": False, "visualizer": False}


def images(batch_size: int) -> Any:
    items = [ImageItem(image=torch.rand(3, 64, 64), gt_label=torch.tensor(0)) for _ in range(SAMPLES)]
    return torch.utils.data.DataLoader(items, batch_size, collate_fn=ImageBatch.collate)


def entry(name: str, kind: Any, **settings: Any) -> Entry:
    def make() -> Any:
        return kind(pre_processor=kind.configure_pre_processor(image_size=(64, 64)), **BARE, **settings)

    return Entry(name, "anomalib", make, images, validates=False, dtype=torch.float32)


ENTRIES = (
    entry("ganomaly", Ganomaly, n_features=8, latent_vec_size=8),
    entry("fastflow", Fastflow, backbone="resnet18", pre_trained=False, flow_steps=2),
    entry("reverse distillation", ReverseDistillation, backbone="resnet18", pre_trained=False),
    entry("cflow", Cflow, backbone="resnet18", pre_trained=False, layers=("layer1", "layer2"), coupling_blocks=2),
)
