"""lightning-uq-box: its methods on the small network of its tutorials."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning_uq_box import uq_methods as uq
from lightning_uq_box.models import MLP
from torch import nn

from tools.others.data import classes, named, normal
from tools.others.entry import Entry


def regression(batch_size: int) -> Any:
    return named(batch_size, input=normal(4), target=normal(1))


def classification(batch_size: int) -> Any:
    return named(batch_size, input=normal(4), target=classes(3))


def mlp(outputs: int, dropout: float = 0.0) -> nn.Module:
    return MLP(n_inputs=4, n_hidden=[16, 16], n_outputs=outputs, dropout_p=dropout, activation_fn=nn.Tanh())


ADAM = partial(torch.optim.Adam, lr=1e-2)


def entry(name: str, make: Any, loader: Any = regression) -> Entry:
    return Entry(name, "lightning-uq-box", make, loader)


ENTRIES = (
    entry("deterministic regression", lambda: uq.DeterministicRegression(mlp(1), nn.MSELoss(), optimizer=ADAM)),
    entry("deterministic classification",
          lambda: uq.DeterministicClassification(mlp(3), nn.CrossEntropyLoss(), optimizer=ADAM), classification),
    entry("mean and variance", lambda: uq.MVERegression(mlp(2), burnin_epochs=0, optimizer=ADAM)),
    entry("quantiles", lambda: uq.QuantileRegression(mlp(3), optimizer=ADAM)),
    entry("deep evidential regression", lambda: uq.DER(mlp(4), optimizer=ADAM)),
    entry("mc dropout", lambda: uq.MCDropoutRegression(mlp(2, 0.2), 5, uq.NLL(), optimizer=ADAM)),
    entry("mixture density", lambda: uq.MDNRegression(mlp(1), n_components=3, optimizer=ADAM)),
)  # fmt: skip
