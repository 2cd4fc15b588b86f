"""Which modules are taken as a whole, and between which a cut may fall."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_parallel.plan.layers import Layers, named_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def net() -> nn.Module:
    model = nn.Module()
    model.embed, model.encoder, model.activation = nn.Linear(4, 4), Encoder(), nn.ReLU()
    model.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return model


BLOCKS = [f"encoder.blocks.{i}" for i in range(3)]
HEAD = ["head.0", "head.1", "head.2"]


def units(layers: Layers) -> set[str]:
    return {name for name in layers.names.values() if name and layers.is_unit(name)}


def test_what_is_made_of_a_list_is_open_and_its_parts_are_layers() -> None:
    layers = Layers(net(), None)
    assert not any(layers.is_unit(name) for name in ("encoder", "encoder.blocks", "head", "activation"))
    called = ["embed", *BLOCKS, *HEAD]
    assert all(map(layers.is_unit, called))
    assert layers.among(called, 3) == {*BLOCKS, *HEAD}
    assert layers.among(called, 9) == set(called)  # too few: all units are
    assert layers.in_lists() == [*BLOCKS, "head.0", "head.2"]


def test_a_layer_that_is_opened_gives_its_parts_in_its_place() -> None:
    layers = Layers(net(), None)
    before = layers.frozen()
    assert layers.can_open(BLOCKS[0], [f"{BLOCKS[0]}.norm", f"{BLOCKS[0]}.linear"])
    assert not layers.can_open(BLOCKS[0], [f"{BLOCKS[0]}.norm"])  # most parameters would be loose
    layers.open(BLOCKS[0])
    parts = [f"{BLOCKS[0]}.norm", f"{BLOCKS[0]}.linear"]
    assert not layers.is_unit(BLOCKS[0]) and before(BLOCKS[0])
    assert layers.among(["embed", *parts, *BLOCKS[1:]], 4) == {*parts, *BLOCKS[1:]}


def test_what_the_user_names_stays_whole() -> None:
    model = net()
    layers = Layers(model, named_layers(model, ["encoder", "head"]))
    assert layers.is_unit("encoder") and layers.is_unit("head")
    assert layers.among(["embed", "encoder", "head"], 2) == {"encoder", "head"}
    assert not layers.can_open("encoder", BLOCKS)


def test_a_unit_inside_another_is_told_and_what_is_not_called() -> None:
    layers = Layers(net(), None)
    assert layers.overlapping([BLOCKS[0], f"{BLOCKS[0]}.linear"]) == BLOCKS[0]
    assert layers.overlapping([*BLOCKS, "embed"]) is None
    assert list(layers.uncalled([*BLOCKS[:2], "embed"])) == [BLOCKS[2], "head"]


@pytest.mark.parametrize(("patterns", "words"), [
    (["encoder.block.*"], "'encoder.block.*' matches no module. Did you mean 'encoder.blocks."),
    (["encoder.blocks"], "'encoder.blocks' is a ModuleList, which isn't called itself: name its modules"),
    (["encoder", "encoder.blocks.*"], "'encoder.blocks.0' is a part of 'encoder': name one of them"),
    ([], "layers=[]: give a list of module names or patterns"),
    ("encoder", "layers='encoder': give a list of module names or patterns"),
])  # fmt: skip
def test_wrong_names_are_refused(patterns: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        named_layers(net(), patterns)
    assert words in str(caught.value)
