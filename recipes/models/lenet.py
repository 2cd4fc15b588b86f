"""LeNet-5 (LeCun et al. 1998), reduced to 8 x 8 images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from recipes.models.classifier import Classifier


class LeNet(Classifier):
    """Two convolutions with pooling, then three linear layers, in one flat ``nn.Sequential``.

    Args:
        channels: of the image.
        size: height and width of the image, a multiple of 4.
        classes: labels.
        optimizer, scheduler: see :func:`recipes.models.optimizer.configure`.
    """

    def __init__(
        self,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any] | None = None,
        channels: int = 1,
        size: int = 8,
        classes: int = 10,
    ) -> None:
        if size % 4:
            raise ValueError(f"model.size={size} is not a multiple of 4: two poolings each halve the image")
        net = nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=3, padding=1),  # [batch, 6, size, size]
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=3, padding=1),  # [batch, 16, size / 2, size / 2]
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (size // 4) ** 2, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )
        super().__init__(net, classes, optimizer, scheduler)
        self.save_hyperparameters()

    def configure_tensor_parallel(self) -> dict[str, str]:
        """The two wide linear layers divide the 120 units between them; the convolutions and the output are small."""
        return {"net.7": "column", "net.9": "row"}
