"""What ranks that save together agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_parallel.checkpoint.agreement import digests, first_few, merge_groups


def test_groups_merge_in_the_order_of_the_model() -> None:
    last = [{"lr": 0.1, "params": ["c.w", "tied"]}, {"lr": 0.2, "params": []}]
    first = [{"lr": 0.1, "params": ["tied", "a.w"]}, {"lr": 0.2, "params": ["a.b"]}]
    order = ["a.w", "a.b", "tied", "c.w"]
    assert merge_groups([last, first], order) == [
        {"lr": 0.1, "params": ["a.w", "tied", "c.w"]},
        {"lr": 0.2, "params": ["a.b"]},
    ]
    assert merge_groups([last, first], [])[0]["params"] == ["c.w", "tied", "a.w"]
    assert merge_groups([[], []], order) == []


@pytest.mark.parametrize("other", [{"lr": 0.2}, {"lr": 0.1, "momentum": 0.9}, {"lr": torch.tensor(0.2)}])
def test_groups_with_other_options_do_not_merge(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="parameter group 0 has"):
        merge_groups([[{"lr": 0.1, "params": []}], [{**other, "params": []}]], [])


def test_options_that_are_tensors_merge() -> None:
    groups = [{"lr": torch.tensor(0.5), "params": []}]
    assert merge_groups([groups, groups], [])[0]["lr"] == 0.5


def test_many_names_are_cut_short() -> None:
    assert first_few("abc") == "a, b, c"
    assert first_few("abcdefg") == "a, b, c, d, e, and 2 more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (3,), (7, 13), (129, 8, 16)])
def test_copies_have_one_digest_and_any_change_gives_another(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).remainder(100).to(dtype).reshape(shape)
    own = digests({"a": tensor})
    padded = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].reshape(shape)  # at another address
    assert digests({"a": padded}) == own
    flat = tensor.reshape(-1)
    for index in {0, len(flat) // 2, len(flat) - 1}:
        changed = flat.clone()
        changed[index] += 1
        assert digests({"a": changed.reshape(shape)}) != own
    if len(shape) > 1:
        assert digests({"a": tensor.flip(0)}) != own
