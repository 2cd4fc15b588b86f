"""deeptab: `fit` of its estimators, on a small table."""

from __future__ import annotations

from typing import Any

import numpy
import pandas
import torch
from deeptab import configs, models

from tools.others.entry import SAMPLES, Entry


def entry(name: str, kind: Any, config: Any, classes: bool = False) -> Entry:
    def train(batch_size: int) -> None:
        random = numpy.random.default_rng(0)
        table = pandas.DataFrame({f"n{i}": random.normal(size=2 * SAMPLES) for i in range(4)})
        table["kind"] = numpy.tile(["a", "b", "c", "d"], SAMPLES // 2)
        target = random.normal(size=2 * SAMPLES)
        kind(model_config=config).fit(table, (target > 0).astype(int) if classes else target, max_epochs=1,
                                      batch_size=batch_size, shuffle=False)  # fmt: skip

    return Entry(name, "deeptab", trains=train, dtype=torch.float32)


ENTRIES = (
    entry("mlp", models.MLPRegressor, configs.MLPConfig(layer_sizes=[16, 16], dropout=0.0)),
    entry("mlp, classes", models.MLPClassifier, configs.MLPConfig(layer_sizes=[16, 16], dropout=0.0), True),
    entry("ft-transformer", models.FTTransformerRegressor,
          configs.FTTransformerConfig(d_model=8, n_layers=2, n_heads=2, attn_dropout=0.0, ff_dropout=0.0)),
    entry("mambular", models.MambularRegressor, configs.MambularConfig(d_model=8, n_layers=2, dropout=0.0)),
)  # fmt: skip
