"""Plans that are found by trying. That such a model trains as the whole one is shown in strategies/test_tensor.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.tensor_plans.pairs import Pair, find_pairs
from lightning_parallel.tensor_plans.plan import find_plan
from lightning_parallel.tensor_plans.plan_search import found_plan, table_of
from tests.tensor.models import Net, gpt2, opt

EXAMPLE = torch.arange(8).view(1, 8)


class Flows(nn.Module):
    """Attention and an MLP, with residuals; ``how`` spoils one of them."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.embed, self.norm = nn.Embedding(5, 8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        q = self.q(x) + (x if self.how == "query meets a whole activation" else 0)
        x = x + self.out((q @ self.k(x).transpose(-1, -2)).softmax(-1) @ self.v(x))
        y = self.drop(self.up(x).relu())
        if self.how == "a layer with weights between":
            y = self.norm(y.unflatten(-1, (2, 8))).flatten(-2)
        elif self.training and self.how == "scales in training":
            y = y / y.abs().max()
        elif self.training and self.how == "draws":
            y = nn.functional.dropout(y)
        x = x + self.down(y)
        return self.down(torch.zeros(1, 16)) + x if self.how == "the row is called for something else" else x


ATTENTION, MLP = Pair(("q", "k", "v"), "out"), Pair(("up",), "down")


@pytest.mark.parametrize(("how", "pairs"), [
    ("", [ATTENTION, MLP]),
    ("query meets a whole activation", [MLP]),
    ("a layer with weights between", [ATTENTION]),
    ("the row is called for something else", [ATTENTION]),
])  # fmt: skip
def test_columns_are_all_that_the_row_takes_in_each_call(how: str, pairs: list[Pair]) -> None:
    net = Flows(how)
    assert find_pairs(net, lambda: net(torch.arange(3))) == pairs


def test_what_is_shipped_for_gpt2_is_found_too_and_a_table_shows_equal_blocks_once() -> None:
    model: Any = gpt2()
    found = found_plan(model, lambda: model(**model.dummy_inputs), 2)
    assert found["transformer.h.0.attn.c_attn"] == "column:3" and found["transformer.h.1.mlp.c_proj"] == "row"
    assert found["transformer.h.0.attn"] == "divide:num_heads,split_size" and "lm_head" not in found
    lines = table_of(model, found).splitlines()
    assert "    transformer.h.*.attn.c_attn: column:3" in lines and lines[-1] == "    lm_head: whole"


def test_a_model_by_hand_is_left_as_it_was() -> None:
    net, shown = Net().train(), list[str]()
    before, state = dict(net.named_parameters()), torch.get_rng_state()
    plan = find_plan(net, announce=shown.append, make_run=lambda: lambda: net(EXAMPLE))
    assert "blocks.*.qkv: column:3" in shown[0]
    assert plan["blocks.1.gate"] == plan["blocks.1.up"] == "column" and plan["blocks.1.down"] == "row"
    assert plan["blocks.0.qkv"] == "column:3" and plan["blocks.0"] == "divide:count"
    assert all(before[name] is parameter for name, parameter in net.named_parameters())
    assert all(part.training for part in net.modules()) and torch.equal(torch.get_rng_state(), state)
    assert [block.count for block in net.blocks] == [4, 4]


def test_what_the_ranks_cannot_share_or_a_norm_needs_whole_stays_whole() -> None:
    net = Net()
    plan = find_plan(net, count=3, make_run=lambda: lambda: net(EXAMPLE))
    assert "blocks.0.qkv" not in plan and plan["blocks.0.up"] == "column"
    net = Net(norm=True)
    plan = find_plan(net, make_run=lambda: lambda: net(EXAMPLE))
    assert "blocks.0.up" not in plan and plan["blocks.0.qkv"] == "column:3"


def test_equal_positions_do_not_hide_wrong_heads() -> None:
    """Attention over equal positions returns their value, however many heads there are."""
    net = Net()
    nn.init.zeros_(net.embed.weight)
    assert find_plan(net, make_run=lambda: lambda: net(EXAMPLE))["blocks.0"] == "divide:count"


@pytest.mark.parametrize(("how", "divided"), [("", {"up"}), ("scales in training", set()), ("draws", {"up"})])
def test_what_a_block_does_in_training_only_is_tried_unless_it_draws(how: str, divided: set[str]) -> None:
    """Its attention, in which each score needs all features, stays whole: no way divides it."""
    torch.manual_seed(0)
    net = Flows(how)
    found = found_plan(net, lambda: net(torch.arange(5)), 2)
    assert {name for name, style in found.items() if style == "column"} == divided


@pytest.mark.parametrize(("factor", "refusal"), [
    (0.5, pytest.raises(ValueError, match="writes into 'head.weight'")),  # as a teacher's average: each trial moves it
    (1, nullcontext()),  # as RWKV's forward, which scales weights for inference, by one in a small model
    (torch.ones(2, 3), pytest.raises(ValueError, match="the first step, by which one is found, raised RuntimeError")),
])  # fmt: skip
def test_a_step_that_fails_or_writes_into_parameters_is_named(factor: Any, refusal: Any) -> None:
    net = Net()

    def run() -> None:
        net.head.weight.data.mul_(factor)
        net(EXAMPLE)

    with refusal:
        assert find_plan(net, make_run=lambda: run)["blocks.0"] == "divide:count"


def test_only_models_without_a_plan_get_one() -> None:
    both = nn.ModuleDict({"gpt": gpt2(), "opt": opt()})

    def run() -> None:
        for model in both.values():
            model(EXAMPLE)

    plan = find_plan(both, make_run=lambda: run)
    assert plan["opt.model.decoder.layers.0.fc1"] == "column" and plan["gpt.transformer.h.*.attn.c_attn"] == "column:3"
    assert not any(name.startswith("gpt.transformer.h.0") for name in plan)


class Listed(nn.ModuleList):
    """Its layers hang in a list inside, which is never called."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self[0]:
            x = layer(x)
        return x


LIST = nn.ModuleList([nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)])


@pytest.mark.parametrize(("net", "columns"), [
    (Listed([LIST]), ["0.0"]),
    (nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), ["linear1"]),  # one operation, in evaluation
])  # fmt: skip
def test_layers_are_found_in_lists_and_in_torch_s_own(net: nn.Module, columns: list[str]) -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    found = found_plan(net, lambda: net(x), 2)
    assert [name for name, style in found.items() if style == "column"] == columns
