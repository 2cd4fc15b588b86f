"""Where plans come from, what a rank holds of a model that they divide, and rules that don't fit, which are refused.
strategies/test_tensor.py trains some."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from lightning_parallel.tensor_plans.around import Copy, Experts, Parameters
from lightning_parallel.tensor_plans.plan import find_plan
from lightning_parallel.tensor_plans.rules import resolve
from lightning_parallel.tensor_plans.sharding import shard_module
from lightning_parallel.tensor_plans.style import Style
from lightning_parallel.tensor_plans.styles import Column, Divide, SharedHeads, read_style
from tests.tensor.helpers import ranks
from tests.tensor.models import LLAMA, GainStyle, Loss, gpt, gpt2, llama, of_transformers


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"in": nn.Linear(2, 2), "act": nn.ReLU()}) for _ in range(12))
        self.flat = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"up": "column", "down": "row"}


def test_the_argument_goes_before_the_hook_and_that_before_what_transformers_bring() -> None:
    assert find_plan(Hooked()) == {"up": "column", "down": "row"}
    assert find_plan(Hooked(), {"up": "column_gather"}) == {"up": "column_gather"}
    plan = find_plan(Loss(llama()))
    assert plan["model.model.layers.*.self_attn.q_proj"] == "column" and plan["model.lm_head"] == "column_gather"
    assert plan["model.model.layers.*.mlp.down_proj"] == "row" and plan["model.model.embed_tokens"] == "embedding"
    assert find_plan(llama().model)["layers.*.self_attn.q_proj"] == "column"  # type: ignore[arg-type]


def test_what_lies_inside_a_model_of_transformers_is_in_its_plan() -> None:
    model = llama()
    alone = find_plan(model)
    model.tower = without_pairs()  # without a plan
    assert find_plan(model) == alone


def test_embeddings_that_scale_stay_whole_with_the_head_tied_to_them() -> None:
    for tied in (True, False):
        model = of_transformers("Gemma", **LLAMA, tie_word_embeddings=tied)
        plan = find_plan(Loss(model))
        assert "model.model.embed_tokens" not in plan
        assert ("model.lm_head" in plan) != tied
        assert plan["model.model.layers.*.mlp.up_proj"] == "column"
        assert shard_module(Loss(model), plan, ranks(2)).shards


def test_without_a_plan_the_layers_are_named() -> None:
    with pytest.raises(ValueError, match=r"the model brings none, .* '0' \(Linear\), '1.weights' \(Embedding\)"):
        find_plan(nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"weights": nn.Embedding(2, 2)})))
    with pytest.raises(ValueError, match=r"plan={}\. .*'blocks.\*.in' \(Linear\), 'flat.0' \(Linear\)\.$"):
        find_plan(Hooked(), {})
    with pytest.raises(ValueError, match=r"MambaModel \(model\) brings none, and none was found: no pair of its"):
        find_plan(Loss(without_pairs()))


def without_pairs() -> nn.Module:
    """Heads that no two ranks can share, and no MLP to divide."""
    return of_transformers("Mamba", "Model", vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4)


def test_a_transformers_plan_with_an_unknown_style_is_refused_whole() -> None:
    model = llama()
    model.tp_plan["model.layers.*.mlp"] = "sequence_parallel"  # type: ignore[index,operator]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM \(model\) .*'model.layers.\*.mlp': 'sequence_parallel'"):
        find_plan(Loss(model))


@pytest.mark.parametrize(("plan", "message"), [
    ({"upp": "column"}, "'upp' matches no module. Did you mean 'up'"),
    ({"*.in": "column"}, r"'\*.in' matches no module. Did you mean 'blocks.\*.in'"),
    ({"up": "colum"}, "'up': unknown style 'colum': did you mean 'column'"),
    ({"up": "sharded"}, "unknown style 'sharded': There are column, column_gather, row"),
    ({"up": "column:qkv"}, "style 'column:qkv' can't be read"),
    ({"up": "divide"}, "style 'divide' can't be read"),
    ({"experts": "experts:gate_up_proj"}, "Write 'experts:up=1x2,down=2,bias=sum'"),
    ({"blocks.1": "row"}, "'row', but 'blocks.1' is a ModuleDict: it is for nn.Linear and transformers' Conv1D"),
    ({"up": "embedding"}, "'embedding', but 'up' is a Linear: it is for nn.Embedding"),
    ({"up": "divide:heads"}, "'up' is a Linear without an integer 'heads'. It has 'in_features', 'out_features'"),
    ({"up": "row:3"}, "'row' takes no options"),
    ({"up": "experts:heads=0"}, "without such a parameter 'heads'"),
    ({"up": "experts:weight=0x5"}, "without such a parameter 'weight'"),
    ({"up": GainStyle()}, "plan: 'up': 'gain', but 'up' is a Linear"),
    ({"blocks.*.in": "column", "blocks.3.*": "row"}, r"both 'blocks.\*.in' and 'blocks.3.\*' match 'blocks.3.in'"),
])  # fmt: skip
def test_rules_that_do_not_fit_are_refused(plan: dict[str, str | Style], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(Hooked(), plan)


def test_styles_are_read() -> None:
    for name in ("row", "row_split", "column_gather", "embedding", "sum_gradient"):
        assert read_style(name).name == name
    for text, style in {
        "column": Column(), "column:3": Column((3,)), "column:512,128,128": Column((512, 128, 128)),
        "divide:num_heads,split_size/2": Divide(("num_heads", "split_size/2")), "heads:2": SharedHeads(2),
        "experts:up=1x2,down=2,bias=sum": Experts((("up", 1, 2), ("down", 2, 1)), ("bias",)),
        "parameters:sinks=0": Parameters((("sinks", 0, 1),)), "copy": Copy(), "copy:64": Copy(64),
    }.items():  # fmt: skip
        assert read_style(text) == style


def test_other_adapters_than_lora_are_refused_by_name() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], use_dora=True)
    model = get_peft_model(llama(), config).base_model.model  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' is a Linear of PEFT with lora_magnitude"):
        resolve(model, find_plan(model))


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
