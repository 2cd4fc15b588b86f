"""Plans that are found by trying: the model trains as the whole one does, and what can't be divided stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.tensor.finding import found_plan, table_of
from lightning_parallel.tensor.flows import Pair, find_pairs
from lightning_parallel.tensor.plan import find_plan
from tests.pool import WorkerPool
from tests.tensor.test_sharding import TIME, VOCABULARY, InDouble, Loss, gpt2, trains_as_the_whole
from tests.thorough import thorough

NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 2 * TIME,
}  # fmt: skip
BERT: dict[str, Any] = {
    **SIZES, "intermediate_size": 26, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0
}  # fmt: skip


EXAMPLE = torch.arange(8).view(1, 8)


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(**SIZES, **NO_DROPOUT, ffn_dim=26, word_embed_proj_dim=16))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**BERT))


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (
        ("layers", 2), ("attention_heads", 4), ("ffn_dim", 26),
    )}  # fmt: skip
    options = {name: value for name, value in SIZES.items() if name in ("vocab_size", "max_position_embeddings")}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return BartForConditionalGeneration(BartConfig(**options, **NO_DROPOUT, **sizes, **tokens, d_model=16))


def bloom() -> nn.Module:
    """Its attention gets slopes of all heads: only the MLPs are divided."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=4))


def gpt_neo() -> nn.Module:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    options = {"attention_types": [[["global"], 2]], "num_heads": 4, "num_layers": 2, "intermediate_size": 26}
    dropout = {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}
    return GPTNeoForCausalLM(GPTNeoConfig(vocab_size=VOCABULARY, hidden_size=16, **options, **dropout))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    options = {"d_model": 16, "d_kv": 4, "d_ff": 26, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **options, decoder_start_token_id=0))
    return model


def falcon() -> nn.Module:
    """Its linear layers have a forward of their own. One key-value head for all queries: only the MLPs are divided."""
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    return FalconForCausalLM(config)


class WithLabels(nn.Module):
    """An encoder and decoder, which are told apart by labels."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = make()

    def forward(self, tokens: Tensor) -> Any:
        return self.inner(input_ids=tokens, decoder_input_ids=tokens)


def bart_with_labels() -> nn.Module:
    return WithLabels(bart)


def t5_with_labels() -> nn.Module:
    return WithLabels(t5)


def test_what_is_shipped_for_gpt2_is_found_too() -> None:
    model: Any = gpt2()
    found = found_plan(model, lambda: model(**model.dummy_inputs), 2)
    assert found["transformer.h.0.attn.c_attn"] == "column:3" and found["transformer.h.1.mlp.c_proj"] == "row"
    assert found["transformer.h.0.attn"] == "divide:num_heads,split_size" and "lm_head" not in found
    assert "transformer.h.*.attn.c_attn: column:3" in table_of(model, found)
    assert table_of(model, found).endswith("lm_head: whole")


def test_attention_that_no_way_divides_stays_whole_and_is_shown() -> None:
    shown: list[str] = []
    model = Loss(bloom())
    plan = find_plan(model, announce=shown.append, make_run=lambda: lambda: model.model(EXAMPLE))
    assert plan["model.transformer.h.0.mlp.dense_h_to_4h"] == "column"
    assert not any("self_attention" in name for name in plan)
    assert "transformer.h.*.self_attention.query_key_value: whole" in shown[0]


class Block(nn.Module):
    """By hand: heads counted by an attribute of any name, a gated MLP, and weights that start as zeros."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.count, self.width = 4, 16
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.norm = nn.LayerNorm(24) if norm else nn.Identity()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.count, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.norm(F.silu(self.gate(x)) * self.up(x)))


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


MODELS = (opt, bert, bart_with_labels, bloom, gpt_neo, t5_with_labels, falcon, Net)


def found_plans_train_as_the_whole(index: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    with InDouble():
        trains_as_the_whole(MODELS[index], group, False)


NAMES = [make.__name__ for make in MODELS]
USUAL = ["opt", "Net"]


@pytest.mark.parametrize("name", [*USUAL, *thorough(*(name for name in NAMES if name not in USUAL))])
def test_found_plans_train_as_the_whole(pool: WorkerPool, name: str) -> None:
    pool.run(found_plans_train_as_the_whole, 2, NAMES.index(name))


def test_pairs_are_told_by_what_flows_into_what() -> None:
    net = Net()
    pairs = find_pairs(net, lambda: net(EXAMPLE))
    assert pairs[:2] == [
        Pair(("blocks.0.qkv",), "blocks.0.out"), Pair(("blocks.0.gate", "blocks.0.up"), "blocks.0.down"),
    ]  # fmt: skip
    assert len(pairs) == 4


def test_a_norm_between_needs_whole_values() -> None:
    net = Net(norm=True)
    rows = [pair.row for pair in find_pairs(net, lambda: net(EXAMPLE))]
    assert rows == ["blocks.0.out", "blocks.1.out"]


def test_a_model_by_hand_is_left_as_it_was() -> None:
    net = Net().train()
    before, state = dict(net.named_parameters()), torch.get_rng_state()
    plan = find_plan(net, make_run=lambda: lambda: net(EXAMPLE))
    assert plan["blocks.1.gate"] == plan["blocks.1.up"] == "column" and plan["blocks.1.down"] == "row"
    assert plan["blocks.0.qkv"] == "column:3" and plan["blocks.0"] == "divide:count"
    assert all(before[name] is parameter for name, parameter in net.named_parameters())
    assert all(part.training for part in net.modules()) and torch.equal(torch.get_rng_state(), state)
    assert [block.count for block in net.blocks] == [4, 4]


def test_what_the_ranks_cannot_share_stays_whole() -> None:
    net = Net()
    plan = find_plan(net, count=3, make_run=lambda: lambda: net(EXAMPLE))
    assert "blocks.0.qkv" not in plan and plan["blocks.0.up"] == "column"


def test_equal_positions_do_not_hide_wrong_heads() -> None:
    """Attention over equal positions returns their value, however many heads there are."""
    net = Net()
    nn.init.zeros_(net.embed.weight)
    assert find_plan(net, make_run=lambda: lambda: net(EXAMPLE))["blocks.0"] == "divide:count"


def test_a_step_that_fails_is_told() -> None:
    net = Net()
    with pytest.raises(ValueError, match="the first step, by which one is found, raised IndexError"):
        find_plan(net, make_run=lambda: lambda: net(torch.full((1, 2), VOCABULARY)))


@torch.no_grad()
def average_in_place(net: Net) -> None:
    net.head.weight.lerp_(net.embed.weight, 0.5)


def replace_the_data(net: Net) -> None:
    net.head.weight.data = net.head.weight.data + 1


@pytest.mark.parametrize("write", [average_in_place, replace_the_data])
def test_a_step_that_writes_into_parameters_is_not_tried_with(write: Callable[[Net], None]) -> None:
    """A teacher's average: each trial would move it."""
    net = Net()

    def run() -> None:
        write(net)
        net(EXAMPLE)

    with pytest.raises(ValueError, match="the first step, by which one is found, writes into 'head.weight'"):
        find_plan(net, make_run=lambda: run)


def test_a_write_that_changes_nothing_does_no_harm() -> None:
    """As RWKV's, which scales weights for inference, by one in a small model."""
    net = Net()

    def run() -> None:
        with torch.no_grad():
            net.head.weight.div_(1)
        net(EXAMPLE)

    assert find_plan(net, make_run=lambda: run)["blocks.0"] == "divide:count"


def test_only_models_without_a_plan_get_one() -> None:
    both = nn.ModuleDict({"gpt": gpt2(), "opt": opt()})

    def run() -> None:
        for model in both.values():
            model(EXAMPLE)

    plan = find_plan(both, make_run=lambda: run)
    assert plan["opt.model.decoder.layers.0.fc1"] == "column" and plan["gpt.transformer.h.*.attn.c_attn"] == "column:3"
    assert not any(name.startswith("gpt.transformer.h.0") for name in plan)
