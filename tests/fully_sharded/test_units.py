"""Units are what can be gathered by itself, and nothing is left without a value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.fully_sharded.units import check_dtypes, materialize
from lightning_parallel.set_up.unit_shards import find_units
from tests.strategies.models import GPT2, Blocks, LeNet


def test_units_are_the_layers_that_hold_parameters() -> None:
    assert list(find_units(Blocks())) == [f"blocks.{i}" for i in range(5)]
    assert list(find_units(GPT2())) == [f"model.transformer.h.{i}" for i in range(4)]
    assert list(find_units(LeNet())) == ["net.0", "net.3", "net.7", "net.9"]
    assert find_units(nn.Linear(3, 3)) == {}
    named = find_units(Blocks(), ["blocks.*.mix", "head"])
    assert list(named) == [*(f"blocks.{i}.mix" for i in range(5)), "head"]


def test_a_module_that_shares_a_weight_is_no_unit() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    net[2].weight = net[0].weight
    assert list(find_units(net)) == ["1"]
    twice = nn.Linear(4, 4)  # one module in two places shares nothing
    assert list(find_units(nn.Sequential(twice, nn.Linear(4, 4), twice))) == ["0", "1"]
    blocks = Blocks()
    blocks.blocks[3].mix = blocks.blocks[1].mix  # but blocks with one layer in both do
    assert list(find_units(blocks)) == ["blocks.0", "blocks.2", "blocks.4"]
    activation = nn.Tanh()  # one that holds nothing is no share
    assert list(find_units(nn.ModuleList(nn.Sequential(nn.Linear(4, 4), activation) for _ in range(2)))) == ["0", "1"]


@pytest.mark.parametrize(("patterns", "words"), [
    (["layers.*"], r"units.*layers\.\*"), ([], r"units=\[\]"),
    (["head", "blocks.1", "*.1.mix"], r"units.*blocks\.1\.mix"),
])  # fmt: skip
def test_names_that_cannot_be_units_are_refused(patterns: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_units(Blocks(), patterns)


def test_a_unit_may_have_frozen_parameters_of_another_dtype() -> None:
    """Of these nothing is sent."""
    frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    check_dtypes("net.1", [nn.Parameter(torch.ones(2)), frozen])


def test_what_is_frozen_stays_so_where_it_gets_its_values() -> None:
    layer = nn.Linear(4, 4, device="meta")
    layer.bias.requires_grad_(False)
    materialize("", layer, torch.device("cpu"))
    assert not layer.weight.is_meta and layer.weight.requires_grad and not layer.bias.requires_grad
