"""darts: `fit` of a list of series."""

from __future__ import annotations

from typing import Any

import numpy
from darts import TimeSeries
from darts import models as darts_models
from darts.utils.likelihood_models import GaussianLikelihood

from tools.others.entry import SAMPLES, Entry

PAST, FUTURE = 8, 4


def series() -> list[TimeSeries]:
    random = numpy.random.default_rng(0)
    return [TimeSeries.from_values(random.normal(size=(PAST + FUTURE, 1))) for _ in range(SAMPLES)]


def entry(name: str, kind: Any, **settings: Any) -> Entry:
    def train(batch_size: int) -> None:
        given = {"input_chunk_length": PAST, "output_chunk_length": FUTURE, "batch_size": batch_size, "n_epochs": 1}
        kind(**(given | settings)).fit(series())

    return Entry(name, "darts", trains=train, validates=False)


ENTRIES = (
    entry("n-beats", darts_models.NBEATSModel, num_stacks=2, num_blocks=1, num_layers=2, layer_widths=16),
    entry("n-hits", darts_models.NHiTSModel, num_stacks=2, num_layers=2, layer_widths=16),
    entry("tcn", darts_models.TCNModel, kernel_size=2, num_filters=4, dropout=0.0),
    entry("transformer", darts_models.TransformerModel, d_model=8, nhead=2, num_encoder_layers=2,
          num_decoder_layers=2, dim_feedforward=16, dropout=0.0),
    entry("block rnn", darts_models.BlockRNNModel, model="LSTM", hidden_dim=8, n_rnn_layers=2, dropout=0.0),
    entry("tft", darts_models.TFTModel, hidden_size=8, num_attention_heads=2, dropout=0.0, add_relative_index=True),
    entry("n-linear", darts_models.NLinearModel),
    entry("tide, gaussian", darts_models.TiDEModel, hidden_size=16, dropout=0.0, likelihood=GaussianLikelihood()),
    entry("ts-mixer", darts_models.TSMixerModel, hidden_size=8, ff_size=8, num_blocks=2, dropout=0.0),
)  # fmt: skip
