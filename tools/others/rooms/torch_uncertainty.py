"""torch-uncertainty: its routines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch_uncertainty.losses import DistributionNLLLoss
from torch_uncertainty.models.classification import resnet
from torch_uncertainty.models.mlp import mlp, packed_mlp
from torch_uncertainty.routines import ClassificationRoutine, RegressionRoutine, SegmentationRoutine
from torch_uncertainty.transforms import RepeatTarget

from tools.others.data import classes, normal, rows
from tools.others.entry import Entry


def adam(model: nn.Module) -> Any:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def classifier(model: nn.Module, **settings: Any) -> Any:
    return ClassificationRoutine(model, 3, nn.CrossEntropyLoss(), optim_recipe=adam(model), **settings)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def regressor() -> Any:
    model = mlp(in_features=4, num_outputs=1, hidden_dims=[16, 16], dist_family="normal")
    return RegressionRoutine(model, 1, DistributionNLLLoss(), dist_family="normal", optim_recipe=adam(model))


def packed() -> Any:
    model = packed_mlp(in_features=4, num_outputs=3, hidden_dims=[16, 16], num_estimators=2, alpha=2)
    return classifier(model, is_ensemble=True, format_batch_fn=RepeatTarget(2))


def segmenter() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return SegmentationRoutine(model, 4, nn.CrossEntropyLoss(), optim_recipe=adam(model))


def table(batch_size: int) -> Any:
    return rows(batch_size, normal(4), classes(3))


def image(batch_size: int) -> Any:
    return rows(batch_size, normal(3, 16, 16), classes(3))


ENTRIES = (
    Entry("classification", "torch-uncertainty", lambda: classifier(network()), table),
    Entry("regression, normal", "torch-uncertainty", regressor, lambda size: rows(size, normal(4), normal(1))),
    Entry("packed ensemble", "torch-uncertainty", packed, table),
    Entry("resnet", "torch-uncertainty",
          lambda: classifier(resnet(in_channels=3, num_classes=3, arch=18, style="cifar", conv_bias=False)), image),
    Entry("segmentation", "torch-uncertainty", segmenter,
          lambda size: rows(size, normal(3, 16, 16), classes(4, 16, 16))),
)  # fmt: skip
