"""gluonts: `train` of its estimators."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from gluonts.dataset.common import ListDataset
from gluonts.torch.model.d_linear import DLinearEstimator
from gluonts.torch.model.deepar import DeepAREstimator
from gluonts.torch.model.patch_tst import PatchTSTEstimator
from gluonts.torch.model.simple_feedforward import SimpleFeedForwardEstimator
from gluonts.torch.model.tft import TemporalFusionTransformerEstimator

from tools.others.entry import SAMPLES, Entry


def series() -> ListDataset:
    random = numpy.random.default_rng(0)
    return ListDataset([{"start": "2026-01-01", "target": random.normal(size=40)} for _ in range(SAMPLES)], freq="D")


def entry(name: str, kind: Any, **settings: Any) -> Entry:
    def train(batch_size: int) -> None:
        kind(prediction_length=4, context_length=8, batch_size=batch_size, **settings).train(series())

    return Entry(name, "gluonts", trains=train, validates=False, dtype=torch.float32)


ENTRIES = (
    entry("deepar", DeepAREstimator, freq="D", hidden_size=8, dropout_rate=0.0),
    entry("feed-forward", SimpleFeedForwardEstimator, hidden_dimensions=[16, 16], batch_norm=False),
    entry("d-linear", DLinearEstimator),
    entry("patchtst", PatchTSTEstimator, patch_len=4, d_model=8, nhead=2, dim_feedforward=16, dropout=0.0),
    entry("tft", TemporalFusionTransformerEstimator, freq="D", hidden_dim=8, variable_dim=8, num_heads=2,
          dropout_rate=0.0),
)  # fmt: skip
