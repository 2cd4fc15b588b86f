"""A model divided by a plan: what each rank holds, and what is refused. strategies/test_tensor.py trains some."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from lightning_parallel.tensor_plans.plan import find_plan
from lightning_parallel.tensor_plans.sharding import shard_module
from tests.tensor.helpers import ranks
from tests.tensor.models import gpt, gpt2, llama

# -- what a rank holds -------------------------------------------------------------------------------------------


def test_as_many_key_value_heads_as_ranks_are_divided() -> None:
    """Whole ones would give the same numbers."""
    model = llama()
    assert "model.layers.0.self_attn.k_proj.weight" in shard_module(model, find_plan(model), ranks(2)).shards


def test_tied_layers_share_one_shard_under_both_names() -> None:
    model = gpt(tie_embeddings=True)
    plan = find_plan(model)
    sharding = shard_module(model, plan, ranks(2))
    assert model.get_parameter("head.weight") is model.get_parameter("token_embedding.weight")
    assert sharding.shards["head.weight"] == sharding.shards["token_embedding.weight"]
    assert sharding.shards.keys() <= dict(model.named_parameters(remove_duplicate=False)).keys()
    clone = copy.deepcopy(model)
    assert clone.get_parameter("head.weight") is clone.get_parameter("token_embedding.weight")
    assert clone.get_parameter("head.weight") is not model.get_parameter("head.weight")
    shard = weakref.ref(model.get_parameter("blocks.0.mlp.0.weight"))
    model.get_submodule("blocks.0.mlp.0").weight = None  # as on another stage
    assert shard() is None  # no other layer keeps it
    with pytest.raises(RuntimeError, match="'token_embedding' is a VocabParallelEmbedding: it is divided already"):
        shard_module(model, plan, ranks(2))


def test_a_layer_with_two_names_is_replaced_under_both_by_one() -> None:
    layer = nn.Linear(4, 4)
    model: Any = nn.ModuleDict({"first": layer, "second": layer})
    sharding = shard_module(model, {"first": "column"}, ranks(2))
    assert model.first is model.second and model.first.weight.shape == (2, 4)
    assert sharding.shards.keys() == {"first.weight", "first.bias", "second.weight", "second.bias"}


# -- refusals ----------------------------------------------------------------------------------------------------


GROUPED = partial(llama, hidden_size=24, num_attention_heads=12, num_key_value_heads=4)


def attention() -> nn.Module:
    model: Any = nn.ModuleDict({"attention": nn.ModuleDict({"qkv": nn.Linear(8, 24)})})
    model.attention.num_heads = 4
    return model


@pytest.mark.parametrize(("make", "plan", "size", "message"), [
    (GROUPED, {}, 6, "k_proj' has 4 key-value heads .of 2., which can't be shared out over 6 tensor"),
    (gpt2, {}, 4, "attn' has num_heads=6, which can't be shared out over 4 tensor ranks"),
    (gpt, {}, 8, "qkv' has 12 attention heads .of 2., which can't be shared out over 8 tensor ranks"),
    (attention, {"attention.qkv": "column:3"}, 2, "keeps num_heads=4: add 'attention': 'divide:num_heads'"),
    (lambda: nn.Sequential(nn.Linear(3, 24)), {"0": "column:5"}, 2, "'0': 24 output features aren't 5 equal"),
    (lambda: nn.Sequential(nn.Linear(3, 24)), {"0": "column_gather:3"}, 2, "'0': gather_output=True with parts"),
    (lambda: nn.Sequential(nn.Linear(3, 24)), {"0": "column:8,8"}, 2, "'0': Parts of sizes .8, 8. add up to 16"),
    (lambda: gpt(tie_embeddings=True), {"head": "column_gather"}, 2, "the same parameter as 'token_embedding.weig"),
    (
        lambda: gpt(tie_embeddings=True), {"head": "row_split", "token_embedding": "embedding"}, 2,
        "'token_embedding': A tied parameter of shape .11, 24. can't be divided in two ways",
    ),
])  # fmt: skip
def test_what_does_not_divide_is_refused_and_left_as_it_was(
    make: Callable[[], nn.Module], plan: dict[str, str], size: int, message: str
) -> None:
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        shard_module(model, plan or find_plan(model), ranks(size))
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert all(getattr(m, "num_heads", 4) in (4, 6) for m in model.modules())
