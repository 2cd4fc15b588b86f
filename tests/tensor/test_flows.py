"""Pairs of linear layers, told by what flows from one into the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_parallel.tensor.flows import Pair, find_pairs


class Net(nn.Module):
    """Attention and an MLP, with residuals; ``how`` spoils one of them."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.embed, self.norm = nn.Embedding(5, 8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        q = self.q(x) + (x if self.how == "query meets a whole activation" else 0)
        x = x + self.out((q @ self.k(x).transpose(-1, -2)).softmax(-1) @ self.v(x))
        y = self.up(x).relu()
        y = self.norm(y.unflatten(-1, (2, 8))).flatten(-2) if self.how == "a layer with weights between" else y
        x = x + self.down(y)
        return self.down(torch.zeros(1, 16)) + x if self.how == "the row is called for something else" else x


def pairs(how: str = "") -> list[Pair]:
    net = Net(how)
    return find_pairs(net, lambda: net(torch.arange(3)))


ATTENTION, MLP = Pair(("q", "k", "v"), "out"), Pair(("up",), "down")


def test_columns_are_all_that_the_row_takes() -> None:
    assert pairs() == [ATTENTION, MLP]


def test_what_meets_a_whole_activation_is_no_column() -> None:
    assert pairs("query meets a whole activation") == [MLP]
    assert pairs("a layer with weights between") == [ATTENTION]


def test_a_row_takes_the_same_in_each_call() -> None:
    assert pairs("the row is called for something else") == [ATTENTION]
