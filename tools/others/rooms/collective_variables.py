"""mlcolvar: collective variables of molecules, by its modules and its data module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from mlcolvar.cvs import AutoEncoderCV, DeepLDA, DeepTDA, RegressionCV, VariationalAutoEncoderCV
from mlcolvar.data import DictDataset, DictModule

from tools.others.entry import SAMPLES, Entry

FEATURES, STATES = 6, 2


def data(batch_size: int) -> DictModule:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * SAMPLES, FEATURES, generator=random)
    labels = torch.arange(len(rows)) % STATES * 1.0
    values = DictDataset({"data": rows, "labels": labels, "target": rows[:, :1].square()})
    return DictModule(values, [0.5, 0.5], batch_size, random_split=False, shuffle=False)


def entry(name: str, make: Callable[[], Any]) -> Entry:
    return Entry(name, "mlcolvar", trains=lambda size: L.Trainer(accelerator="cpu").fit(make(), datamodule=data(size)))


ENTRIES = (
    entry("deep-tda", lambda: DeepTDA(STATES, 1, [-7.0, 7.0], [0.2, 0.2], [FEATURES, 16, 16, 1])),
    entry("deep-lda", lambda: DeepLDA([FEATURES, 16, 16, 2], STATES)),
    entry("regression", lambda: RegressionCV([FEATURES, 16, 16, 1])),
    entry("autoencoder", lambda: AutoEncoderCV([FEATURES, 16, 2])),
    entry("variational autoencoder", lambda: VariationalAutoEncoderCV(2, [FEATURES, 16])),
)
