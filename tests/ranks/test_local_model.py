"""ranks/local_model.py: what a rank holds, under names that don't depend on ties."""

from __future__ import annotations

import torch
from torch import nn

from lightning_parallel.ranks.local_model import LocalModel


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def test_tied_parameters_appear_once_and_every_name_leads_to_them() -> None:
    module = Tied()
    local = LocalModel.of(module)
    assert list(local.parameters) == ["embedding.weight", "norm.weight", "norm.bias"]
    assert local.aliases["head.weight"] == local.aliases["embedding.weight"] == "embedding.weight"
    assert set(local.aliases) == {name for name, _ in module.named_parameters(remove_duplicate=False)}
    assert local.names[id(module.head.weight)] == "embedding.weight"
    assert local.names is local.names  # clipping looks parameters up in every update
    assert local.replicated == local.parameters and not local.is_fully_sharded


def test_buffers_are_those_that_a_checkpoint_has_as_they_are_now() -> None:
    module = Tied()
    local = LocalModel.of(module)
    assert set(local.buffers()) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    module.norm.running_mean = torch.ones(2)  # replaced, not written to
    assert torch.equal(local.buffers()["norm.running_mean"], torch.ones(2))
