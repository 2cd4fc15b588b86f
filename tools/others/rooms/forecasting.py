"""pytorch-forecasting: modules made from a data set, as its tutorials do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pandas
import pytorch_forecasting as pf
import torch
from pytorch_forecasting.data import GroupNormalizer, NaNLabelEncoder
from pytorch_forecasting.metrics import MAE, SMAPE, NormalDistributionLoss, QuantileLoss

from tools.others.entry import SAMPLES, Entry

SERIES, PAST, FUTURE = SAMPLES, 8, 4


def table() -> pandas.DataFrame:
    random = numpy.random.default_rng(0)
    length = PAST + FUTURE
    return pandas.DataFrame(
        {
            "series": numpy.repeat([f"s{i:02d}" for i in range(SERIES)], length),
            "time": numpy.tile(numpy.arange(length), SERIES),
            "value": random.normal(size=SERIES * length) + 3,
            "known": random.normal(size=SERIES * length),
        }
    )


def windows(**changes: Any) -> pf.TimeSeriesDataSet:
    settings: dict[str, Any] = {
        "time_idx": "time",
        "target": "value",
        "group_ids": ["series"],
        "max_encoder_length": PAST,
        "max_prediction_length": FUTURE,
        "time_varying_unknown_reals": ["value"],
        "target_normalizer": GroupNormalizer(groups=["series"]),
    }
    return pf.TimeSeriesDataSet(table(), **(settings | changes))


def loader(**changes: Any) -> Callable[[int], Any]:
    return lambda batch_size: windows(**changes).to_dataloader(train=False, batch_size=batch_size)


PLAIN: dict[str, Any] = {}
RICH: dict[str, Any] = {
    "static_categoricals": ["series"],
    "time_varying_known_reals": ["time", "known"],
    "categorical_encoders": {"series": NaNLabelEncoder(add_nan=True)},
    "add_relative_time_idx": True,
    "add_target_scales": True,
}
RECURRENT: dict[str, Any] = {"time_varying_known_reals": ["time", "known"]}


def entry(name: str, kind: Any, data: dict[str, Any], **settings: Any) -> Entry:
    return Entry(
        name,
        "pytorch-forecasting",
        lambda: kind.from_dataset(windows(**data), learning_rate=0.01, **settings),
        loader(**data),
        dtype=torch.float32,  # as the package's data sets are
    )


ENTRIES = (
    entry("n-beats", pf.NBeats, PLAIN, widths=[8, 16], num_blocks=[1, 1], num_block_layers=[2, 2], dropout=0.0),
    entry("n-hits", pf.NHiTS, PLAIN, hidden_size=16, dropout=0.0, loss=MAE()),
    entry("deepar", pf.DeepAR, RECURRENT, hidden_size=8, rnn_layers=2, dropout=0.0, loss=NormalDistributionLoss()),
    entry("recurrent network", pf.RecurrentNetwork, RECURRENT, hidden_size=8, rnn_layers=2, dropout=0.0, loss=SMAPE()),
    entry("decoder mlp", pf.DecoderMLP, {"time_varying_known_reals": ["time", "known"],
          "min_encoder_length": PAST}, hidden_size=16, n_hidden_layers=3, dropout=0.0),
    entry("tide", pf.models.TiDEModel, RECURRENT, hidden_size=16, dropout=0.0),
    entry("temporal fusion transformer", pf.TemporalFusionTransformer, RICH, hidden_size=8, attention_head_size=2,
          hidden_continuous_size=4, dropout=0.0, loss=QuantileLoss()),
)  # fmt: skip
