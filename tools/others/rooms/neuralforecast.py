"""neuralforecast: `NeuralForecast.fit` of a table of series."""

from __future__ import annotations

from typing import Any

import numpy
import pandas
import torch
from neuralforecast import NeuralForecast, models
from neuralforecast.losses.pytorch import DistributionLoss, MQLoss

from tools.others.entry import SAMPLES, Entry

PAST, FUTURE = 12, 4


def table() -> pandas.DataFrame:
    random = numpy.random.default_rng(0)
    times = pandas.date_range("2026-01-01", periods=PAST + 2 * FUTURE, freq="D")
    frames = [
        pandas.DataFrame(
            {"unique_id": f"s{i:02d}", "ds": times, "y": random.normal(size=len(times)).cumsum().astype("float32")}
        )
        for i in range(SAMPLES)
    ]
    return pandas.concat(frames)


def entry(name: str, kind: Any, *, multivariate: bool = False, validated: int = FUTURE, **settings: Any) -> Entry:
    def train(batch_size: int) -> None:
        given = {"h": FUTURE, "input_size": PAST, "max_steps": 2, "batch_size": batch_size, "windows_batch_size": None}
        if multivariate:
            given |= {"n_series": SAMPLES}
            del given["windows_batch_size"]
        NeuralForecast([kind(**(given | settings))], freq="D").fit(table(), val_size=validated)

    # Series are float32 in the package's own data sets.
    return Entry(name, "neuralforecast", trains=train, dtype=torch.float32)


ENTRIES = (
    entry("mlp, no validation", models.MLP, validated=0, hidden_size=16, num_layers=3),
    entry("n-beats, no validation", models.NBEATS, validated=0, mlp_units=[[16, 16]] * 3),
    entry("mlp", models.MLP, hidden_size=16, num_layers=3),
    entry("n-hits, quantiles", models.NHITS, mlp_units=[[16, 16]] * 3, loss=MQLoss(level=[80])),
    entry("lstm", models.LSTM, encoder_hidden_size=8, decoder_hidden_size=8),
    entry("deepar", models.DeepAR, lstm_hidden_size=8, lstm_dropout=0.0, loss=DistributionLoss("Normal", level=[80])),
    entry("tft", models.TFT, hidden_size=8, n_head=2, dropout=0.0),
    entry("patchtst", models.PatchTST, hidden_size=8, n_heads=2, linear_hidden_size=16, patch_len=4, stride=4,
          encoder_layers=2, dropout=0.0, fc_dropout=0.0),
    entry("dlinear", models.DLinear),
    entry("tide", models.TiDE, hidden_size=16, decoder_output_dim=4, temporal_decoder_dim=8),
    entry("itransformer", models.iTransformer, multivariate=True, hidden_size=8, n_heads=2, e_layers=2, d_ff=16),
    entry("tsmixer", models.TSMixer, multivariate=True, ff_dim=8, dropout=0.0),
)  # fmt: skip
