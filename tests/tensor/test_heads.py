"""Grouped-query attention with fewer key-value heads than ranks trains as the whole model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.tensor.heads import SharedHeadsLinear
from lightning_parallel.tensor.plan import find_plan
from lightning_parallel.tensor.rules import resolve, with_few_heads
from lightning_parallel.tensor.sharding import shard_module
from lightning_parallel.tensor.styles import Column, SharedHeads
from tests.pool import WorkerPool
from tests.tensor.test_sharding import LLAMA, InDouble, ranks, seeded, trains_as_the_whole
from tests.thorough import thorough


def llama(heads: int = 1, queries: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "num_attention_heads": queries, "num_key_value_heads": heads, "hidden_size": 2 * queries,
        "attention_bias": True,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **options}))


def qwen3(heads: int = 1) -> nn.Module:
    """With norms of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**LLAMA, "num_key_value_heads": heads}))


def few_heads_train_as_the_whole(heads: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    trains_as_the_whole(llama, group, True, heads=heads)
    with InDouble():
        trains_as_the_whole(qwen3, group, False, heads=heads)


@pytest.mark.parametrize(("size", "heads"), [(2, 1), *thorough((4, 1), (4, 2))])
def test_fewer_key_value_heads_than_ranks_train_as_the_whole(pool: WorkerPool, size: int, heads: int) -> None:
    pool.run(few_heads_train_as_the_whole, size, heads)


@pytest.mark.parametrize(("rank", "head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_a_rank_computes_the_head_of_its_queries(rank: int, head: int) -> None:
    model = seeded(llama, heads=2)
    whole = copy.deepcopy(model)
    name = "model.layers.1.self_attn"
    sharding = shard_module(model, find_plan(model), ranks(4, rank))
    x = torch.randn(3, 8, dtype=torch.float64)
    layer = model.get_submodule(f"{name}.k_proj")
    assert isinstance(layer, SharedHeadsLinear)
    torch.testing.assert_close(layer(x), whole.get_submodule(f"{name}.k_proj")(x)[:, 2 * head : 2 * head + 2])
    assert model.get_submodule(name).num_key_value_groups == 1
    assert f"{name}.k_proj.weight" not in sharding.shards and f"{name}.k_proj.weight" in sharding.partial


def test_only_where_the_ranks_are_a_multiple_of_the_heads() -> None:
    def style(heads: int, queries: int, count: int) -> object:
        model = llama(heads, queries)
        rules = with_few_heads(model, resolve(model, find_plan(model)), count)
        return next(rule.style for rule in rules if rule.name.endswith("k_proj"))

    assert style(2, 4, 4) == SharedHeads(2) and style(1, 4, 2) == SharedHeads(1)
    assert style(2, 4, 2) == Column() and style(4, 12, 6) == Column()
