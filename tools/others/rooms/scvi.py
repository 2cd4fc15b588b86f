"""scvi-tools: `train` of its models, on synthetic counts."""

from __future__ import annotations

from typing import Any

import scvi
import torch

from tools.others.entry import Entry


def entry(name: str, kind: Any, setup: dict[str, Any] | None = None, **settings: Any) -> Entry:
    def train(batch_size: int) -> None:
        scvi.settings.seed = 0  # as its tutorials begin; without it each process divides the cells otherwise
        data = scvi.data.synthetic_iid(batch_size=40, n_genes=20)
        kind.setup_anndata(data, **({"batch_key": "batch"} if setup is None else setup))
        kind(data, **settings).train(max_epochs=1, batch_size=batch_size, accelerator="cpu", devices=1, logger=False)

    return Entry(name, "scvi-tools", trains=train, dtype=torch.float32)


ENTRIES = (
    entry("scvi", scvi.model.SCVI, n_hidden=16, n_latent=4, dropout_rate=0.0),
    entry("linear scvi", scvi.model.LinearSCVI, n_hidden=16, n_latent=4, dropout_rate=0.0),
    entry("scanvi", scvi.model.SCANVI, {"batch_key": "batch", "labels_key": "labels", "unlabeled_category": "label_0"},
          n_hidden=16, n_latent=4, dropout_rate=0.0),
    entry("autozi", scvi.model.AUTOZI, n_hidden=16, n_latent=4, dropout_rate=0.0),
)  # fmt: skip
