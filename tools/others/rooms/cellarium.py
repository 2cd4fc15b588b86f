"""cellarium-ml: its module around models of single cells."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from cellarium.ml import CellariumModule
from cellarium.ml.models import LogisticRegression, ProbabilisticPCA
from torch.utils.data import DataLoader

from tools.others.data import Dicts, classes, normal
from tools.others.entry import SAMPLES, Entry

GENES = [f"g{i}" for i in range(10)]


def collate(samples: list[Any]) -> Any:
    columns = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return columns | {"var_names_g": numpy.array(GENES)}


def cells(batch_size: int) -> Any:
    return DataLoader(Dicts(x_ng=normal(len(GENES)), y_n=classes(3)), batch_size, collate_fn=collate)


def entry(name: str, make: Any) -> Entry:
    def module() -> Any:
        return CellariumModule(model=make(), optim_fn=torch.optim.Adam, optim_kwargs={"lr": 1e-2})

    return Entry(name, "cellarium-ml", module, cells, validates=False)


ENTRIES = (
    entry("logistic regression", lambda: LogisticRegression(SAMPLES, GENES, 3)),
    entry("probabilistic pca", lambda: ProbabilisticPCA(SAMPLES, GENES, 2, "marginalized", mean_g=torch.zeros(10))),
)
