"""replay-rec: the next item of a sequence, as in its examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.models.nn.sequential import bert4rec
from replay.nn.lightning import LightningModule
from replay.nn.loss import BCE, CESampled
from replay.nn.sequential import SasRec
from torch.utils.data import DataLoader

from tools.others.entry import SAMPLES, Entry

ITEMS, LENGTH, WIDTH = 12, 6, 16
SCHEMA = TensorSchema(
    [
        TensorFeatureInfo(
            "item_id", FeatureType.CATEGORICAL, is_seq=True, feature_hint=FeatureHint.ITEM_ID, cardinality=ITEMS,
            feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")], padding_value=ITEMS,
            embedding_dim=WIDTH,
        )
    ]
)  # fmt: skip


def sequence(shortest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Items, with padding before them, and where there are items."""
    items, length = torch.randint(0, ITEMS, (LENGTH + 1,)), int(torch.randint(shortest, LENGTH + 2, ()))
    is_item = torch.arange(LENGTH + 1) > LENGTH - length
    return items.masked_fill(~is_item, ITEMS), is_item


def next_items(batch_size: int, shortest: int = 3, negatives: int = 0) -> Any:
    """Batches as the package's ParquetModule makes them with the default transforms."""
    samples = []
    for _ in range(SAMPLES):
        items, is_item = sequence(shortest)
        samples.append({
            "feature_tensors": {"item_id": items[:-1]},
            "padding_mask": is_item[:-1],
            "positive_labels": items[1:, None],
            "target_padding_mask": is_item[1:, None],
            **({"negative_labels": torch.randint(0, ITEMS, (negatives,))} if negatives else {}),
        })  # fmt: skip
    return DataLoader(samples, batch_size)  # type: ignore[arg-type]


def masked_items(batch_size: int) -> Any:
    """Whole sequences: the padding is an item more than its embedding has."""
    samples = []
    masker = bert4rec.dataset.Bert4RecUniformMasker(0.3)
    for index in range(SAMPLES):
        items, is_item = sequence(LENGTH + 1)
        items, is_item = items[1:], is_item[1:]
        samples.append({
            "query_id": torch.tensor([index]),
            "pad_mask": is_item,
            "inputs": {"item_id": items},
            "token_mask": masker.mask(is_item),
            "positive_labels": items,
        })  # fmt: skip
    return DataLoader(samples, batch_size)  # type: ignore[arg-type]


def sasrec(loss: Any = None, dropout: float = 0.0) -> Any:
    network = SasRec.from_params(
        SCHEMA, embedding_dim=WIDTH, num_heads=2, num_blocks=2, max_sequence_length=LENGTH, dropout=dropout
    )
    if loss is not None:
        loss.logits_callback = network.get_logits
        network.loss = loss
    return LightningModule(network)


def bert() -> Any:
    return bert4rec.Bert4Rec(
        SCHEMA, block_count=2, head_count=2, hidden_size=WIDTH, max_seq_len=LENGTH, dropout_rate=0.0
    )


ENTRIES = (
    Entry("sasrec", "replay-rec", sasrec, next_items, validates=False),
    Entry("sasrec, no padding", "replay-rec", sasrec, partial(next_items, shortest=LENGTH + 1)),
    Entry("sasrec, dropout", "replay-rec", partial(sasrec, dropout=0.2), next_items),
    Entry("sasrec, sampled", "replay-rec", lambda: sasrec(CESampled(ignore_index=ITEMS)),
          partial(next_items, negatives=4)),
    Entry("sasrec, binary", "replay-rec", lambda: sasrec(BCE()), next_items),
    Entry("bert4rec", "replay-rec", bert, masked_items, validates=False),
)  # fmt: skip
