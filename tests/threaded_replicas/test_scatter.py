"""A batch into shares: every sample once, in order, with its graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from lightning_parallel.batch import mapped, tensors
from lightning_parallel.threaded_replicas.scatter import scatter

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    rows: Tensor
    name: str


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_shares_differ_by_one_sample_at_most_and_none_is_empty(n: int, devices: int) -> None:
    shares = scatter(torch.arange(n), [CPU] * devices)
    samples = [share.samples for share in shares]
    assert len(shares) == min(n, devices)
    assert sum(samples) == n and max(samples) - min(samples) <= 1 and min(samples) >= 1
    assert torch.cat([share.batch for share in shares]).tolist() == list(range(n))


@pytest.mark.parametrize("make", [
    lambda rows: (rows, rows + 1),
    lambda rows: [rows, {"deep": (rows, "text", 3)}],
    lambda rows: {"rows": rows, "empty": {}, "none": None},
    lambda rows: Pair(rows, "all"),
    lambda rows: BatchEncoding({"input_ids": rows}),
])  # fmt: skip
def test_containers_keep_their_types(make: Any) -> None:
    batch = make(torch.arange(10).view(5, 2))
    shares = scatter(batch, [CPU] * 2)
    assert [type(share.batch) for share in shares] == [type(batch)] * 2
    for whole, *parts in zip(tensors(batch), *(tensors(share.batch) for share in shares), strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_tensors_with_a_graph_become_leaves_of_the_share() -> None:
    rows = torch.ones(4, 2, requires_grad=True) * 2
    shares = scatter({"rows": rows, "labels": torch.zeros(4)}, [CPU] * 2)
    for share in shares:
        assert share.batch["rows"].is_leaf and share.batch["rows"].requires_grad
        assert [id(leaf) for leaf in share.leaves] == [id(share.batch["rows"])]
        assert share.sources[0].grad_fn is not None
    with torch.no_grad():
        assert not any(share.leaves for share in scatter(rows, [CPU] * 2))


def test_a_batch_that_cannot_be_divided_is_told() -> None:
    with pytest.raises(ValueError, match=r"batch\[0\] has 2, batch\[1\] has 3"):
        scatter((torch.zeros(2), torch.zeros(3)), [CPU] * 2)


def test_mapped_leaves_a_tree_without_changes_as_it_is() -> None:
    tree = {"a": (torch.zeros(1), "b")}
    assert mapped(tree, lambda tensor: tensor) is tree
    assert mapped(tree, lambda tensor: tensor + 1)["a"][0] == 1
