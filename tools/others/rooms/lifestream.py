"""pytorch-lifestream: encoders of event sequences, as in its demos."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torchmetrics
from ptls.data_load.datasets import MemoryMapDataset
from ptls.frames.coles import ColesDataset, CoLESModule
from ptls.frames.coles.split_strategy import SampleSlices
from ptls.frames.supervised import SeqToTargetDataset, SequenceToTarget
from ptls.nn import Head, RnnSeqEncoder, TrxEncoder

from tools.others.entry import SAMPLES, Entry

ADAM = partial(torch.optim.Adam, lr=1e-2)
DECAY = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9)


def clients() -> MemoryMapDataset:
    return MemoryMapDataset(
        [
            {
                "event_time": torch.arange(20),
                "kind": torch.randint(1, 5, (20,)),
                "amount": torch.randn(20),
                "target": index % 2,
            }
            for index in range(SAMPLES)
        ]
    )


def encoder() -> Any:
    events = TrxEncoder(embeddings={"kind": {"in": 5, "out": 4}}, numeric_values={"amount": "identity"},
                        embeddings_noise=0.0)  # fmt: skip
    return RnnSeqEncoder(events, hidden_size=8)


def supervised() -> Any:
    return SequenceToTarget(encoder(), Head(8, use_batch_norm=False, objective="classification", num_classes=2),
                            torch.nn.NLLLoss(), torchmetrics.Accuracy(task="multiclass", num_classes=2),
                            optimizer_partial=ADAM, lr_scheduler_partial=DECAY)  # fmt: skip


def coles() -> Any:
    return CoLESModule(encoder(), optimizer_partial=ADAM, lr_scheduler_partial=DECAY)


def labelled(batch_size: int) -> Any:
    data = SeqToTargetDataset(clients(), target_col_name="target", target_dtype="long")
    return torch.utils.data.DataLoader(data, batch_size, collate_fn=data.collate_fn)


def slices(batch_size: int) -> Any:
    data = ColesDataset(clients(), SampleSlices(split_count=2, cnt_min=5, cnt_max=10))
    return torch.utils.data.DataLoader(data, batch_size, collate_fn=data.collate_fn)


ENTRIES = (
    Entry("sequence to target", "pytorch-lifestream", supervised, labelled),
    Entry("coles", "pytorch-lifestream", coles, slices, validates=False),
)
