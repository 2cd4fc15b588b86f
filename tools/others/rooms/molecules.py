"""chemprop: its message passing networks on molecules, as in its notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from chemprop import data, models, nn

from tools.others.entry import SAMPLES, Entry

MOLECULES = ["CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCC", "CO", "CCOC", "C1CCCCC1"]


def loader(tasks: int = 1, classes: bool = False) -> Callable[[int], Any]:
    def make(batch_size: int) -> Any:
        random = numpy.random.default_rng(0)
        targets = random.normal(size=(SAMPLES, tasks))
        targets = (targets > 0).astype(float) if classes else targets
        points = [data.MoleculeDatapoint.from_smi(MOLECULES[i % len(MOLECULES)], y) for i, y in enumerate(targets)]
        return data.build_dataloader(data.MoleculeDataset(points), batch_size=batch_size, shuffle=False)

    return make


def network(predictor: Any, *, batch_norm: bool = True, atoms: bool = False) -> Any:
    message = (nn.AtomMessagePassing if atoms else nn.BondMessagePassing)(d_h=16, depth=3)
    return models.MPNN(message, nn.MeanAggregation(), predictor, batch_norm, warmup_epochs=1)


ENTRIES = (
    Entry("mpnn, regression", "chemprop", lambda: network(nn.RegressionFFN(input_dim=16, hidden_dim=16)), loader()),
    Entry("mpnn, classification", "chemprop",
          lambda: network(nn.BinaryClassificationFFN(n_tasks=2, input_dim=16, hidden_dim=16), batch_norm=False),
          loader(2, True)),
    Entry("mpnn, atoms", "chemprop",
          lambda: network(nn.RegressionFFN(input_dim=16, hidden_dim=16), batch_norm=False, atoms=True), loader()),
)  # fmt: skip
