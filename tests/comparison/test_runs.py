"""comparison/runs.py: the batches of ranks that run a layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_parallel.comparison.runs import Shares


def test_a_replicas_share_of_a_batch_has_memory_of_its_own() -> None:
    """The copy of a view has the memory of all: each rank would be measured with the batch of all replicas."""
    strategy = SimpleNamespace(broadcast=lambda given: given)
    sampler = {"num_replicas": 2, "rank": 1}
    trainer: Any = SimpleNamespace(strategy=strategy, distributed_sampler_kwargs=sampler)
    whole: Any = torch.arange(8.0)
    whole.tag = "a"  # as subclasses do
    shares = Shares([whole, whole])
    shares.setup(trainer, nn.Identity(), "fit")  # type: ignore[arg-type]
    for share in shares:
        assert share.tolist() == [4, 5, 6, 7] and share.untyped_storage().nbytes() == 16
        assert share.tag == "a"
