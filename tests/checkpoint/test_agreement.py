"""What ranks that save together agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_parallel.checkpoint.agreement import first_few, merge_groups


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


def test_options_of_a_rank_s_own_may_differ_and_others_may_not() -> None:
    first, second = {"lr": 0.1, "d": 1.0, "params": ["a"]}, {"lr": 0.1, "d": 2.0, "params": ["b"]}
    (group,) = merge_groups([[first], [second]], ["a", "b"], {"d"})
    assert group == {"lr": 0.1, "d": 1.0, "params": ["a", "b"]}
    with pytest.raises(ValueError, match="has lr=0.1 on one rank and 0.2 on another"):
        merge_groups([[first], [{**second, "lr": 0.2}]], [], {"d"})
