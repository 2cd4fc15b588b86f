"""A perceptron for small images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from recipes.models.classifier import Classifier


class MLP(Classifier):
    """Flattens an image and passes it through ``layers`` hidden layers with ReLU, in one ``nn.Sequential``.

    Args:
        features: numbers in an image, e.g. 64 for 8 x 8.
        classes: labels.
        width: units of a hidden layer.
        layers: hidden layers.
        dropout: probability, after each hidden layer.
        optimizer, scheduler: see :func:`recipes.models.optimizer.configure`.
    """

    def __init__(
        self,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any] | None = None,
        features: int = 64,
        classes: int = 10,
        width: int = 128,
        layers: int = 3,
        dropout: float = 0.0,
    ) -> None:
        sizes = [features, *[width] * layers]
        hidden = [
            nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout))
            for inputs, outputs in zip(sizes, sizes[1:], strict=False)
        ]
        net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes))
        super().__init__(net, classes, optimizer, scheduler)
        self.save_hyperparameters()

    def configure_tensor_parallel(self) -> dict[str, str]:
        """Pairs of hidden layers divide what is between them; one that is left over gathers what it computes."""
        layers = range(1, self.hparams["layers"] + 1)  # of the net, after the flattening
        styles = {i: "column" if i % 2 else "row" for i in layers}
        if len(layers) % 2:
            styles[layers[-1]] = "column_gather"
        return {f"net.{i}.0": style for i, style in styles.items()}
