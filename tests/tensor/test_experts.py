"""Mixtures of experts, divided by the plans that their models bring, train as the whole model does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.tensor.module_styles import Experts
from lightning_parallel.tensor.plan import find_plan
from lightning_parallel.tensor.rules import resolve
from lightning_parallel.tensor.sharding import shard_module
from tests.pool import WorkerPool
from tests.tensor.test_sharding import LLAMA, InDouble, Loss, ranks, trains_as_the_whole
from tests.thorough import thorough

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}
LATENT: dict[str, Any] = {  # DeepSeek's attention
    "kv_lora_rank": 6, "q_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "moe_intermediate_size": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "head_dim": 2,
}  # fmt: skip


def mixtral(**options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    odd = {"num_local_experts": 4, "intermediate_size": 13}
    return MixtralForCausalLM(MixtralConfig(**{**LLAMA, **MOE, **odd, **options}))


def qwen2_moe() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    options = {"num_experts": 4, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 6}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**LLAMA, **MOE, **options, mlp_only_layers=[0]))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**LLAMA, **MOE, num_experts=4, moe_intermediate_size=6))


def olmoe() -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(OlmoeConfig(**LLAMA, **MOE, num_experts=4))


def deepseek_v2() -> nn.Module:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(DeepseekV2Config(**{**LLAMA, **MOE, **LATENT, "topk_method": "greedy"}))


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**LLAMA, **MOE, **LATENT}))


def llama4() -> nn.Module:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    options = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 12, "attention_chunk_size": 8}
    return Llama4ForCausalLM(Llama4TextConfig(**{**LLAMA, **options}))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return GptOssForCausalLM(GptOssConfig(**LLAMA, **MOE, num_local_experts=4, rope_parameters=rope))


def phimoe() -> nn.Module:
    from transformers import PhimoeConfig, PhimoeForCausalLM

    options = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    return PhimoeForCausalLM(PhimoeConfig(**LLAMA, **MOE, **options, num_local_experts=4))


def granitemoe() -> nn.Module:
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    options = {name: value for name, value in LLAMA.items() if name != "head_dim"}
    return GraniteMoeForCausalLM(GraniteMoeConfig(**options, **MOE, num_local_experts=4))


def longcat() -> nn.Module:
    from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

    options = {"ffn_hidden_size": 12, "expert_ffn_hidden_size": 6, "moe_topk": 2, "zero_expert_num": 2, "num_layers": 1}
    latent = {name: value for name, value in LATENT.items() if name not in ("first_k_dense_replace", "n_group")}
    llama = {name: value for name, value in LLAMA.items() if name not in ("intermediate_size", "num_hidden_layers")}
    return LongcatFlashForCausalLM(LongcatFlashConfig(**{**llama, **latent, **options}))


MODELS = (
    mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v2, deepseek_v3, llama4, gpt_oss, phimoe, granitemoe, longcat,
)  # fmt: skip


def eager(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """With kernels that know float64."""

    @functools.wraps(make)
    def made() -> nn.Module:
        model = make()
        model.set_experts_implementation("eager")  # type: ignore[operator]
        return model

    return made


def experts_train_as_the_whole(index: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    with InDouble():
        trains_as_the_whole(eager(MODELS[index]), group, False)


NAMES = [make.__name__ for make in MODELS]
USUAL = ["deepseek_v3", "gpt_oss"]  # the two that differ most


@pytest.mark.parametrize("name", [*USUAL, *thorough(*(name for name in NAMES if name not in USUAL))])
def test_experts_train_as_the_whole(pool: WorkerPool, name: str) -> None:
    pool.run(experts_train_as_the_whole, 2, NAMES.index(name))


def default_kernels_train_as_the_whole() -> None:
    """In float32, where torch's grouped kernel runs."""
    torch.set_default_dtype(torch.float32)
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model = mixtral(intermediate_size=16)
    tokens = torch.randint(11, (2, 12))
    whole, sharded = Loss(copy.deepcopy(model)), Loss(model)
    plan = {f"model.{pattern}": style for pattern, style in find_plan(model).items()}
    sharding = shard_module(sharded, plan, group)
    losses = [m(tokens, tokens) for m in (whole, sharded)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    theirs = dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        expected = theirs[name].grad
        assert parameter.grad is not None and expected is not None
        mine = sharding.shards[name].take(expected) if name in sharding.shards else expected
        torch.testing.assert_close(parameter.grad, mine, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_default_kernels_train_as_the_whole(pool: WorkerPool) -> None:
    pool.run(default_kernels_train_as_the_whole, 2)


def test_parameters_of_experts_are_cut_part_by_part() -> None:
    model = mixtral()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    name = "model.layers.0.mlp.experts"
    assert find_plan(model)["model.layers.*.mlp.experts"] == Experts((("gate_up_proj", 1, 2), ("down_proj", 2, 1)))
    shard_module(model, find_plan(model), ranks(2, 1))
    gate, up = before[f"{name}.gate_up_proj"].chunk(2, 1)
    assert torch.equal(model.get_parameter(f"{name}.gate_up_proj"), torch.cat([gate[:, 7:], up[:, 7:]], 1))
    assert torch.equal(model.get_parameter(f"{name}.down_proj"), before[f"{name}.down_proj"][..., 7:])
    experts = model.get_submodule(name)
    assert type(experts).__name__ == "ParallelMixtralExperts" and copy.deepcopy(experts).group is experts.group


@pytest.mark.parametrize(("style", "message"), [
    ("experts:gate_up_proj=1x5,down_proj=2", "without such a parameter 'gate_up_proj'. Its own ones are 'gate_up"),
    ("experts:weight=1", "without such a parameter 'weight'"),
    ("experts:gate_up_proj", "Write 'experts:up=1x2,down=2,bias=sum'"),
])  # fmt: skip
def test_experts_that_do_not_fit_are_refused(style: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(mixtral(), {"model.layers.*.mlp.experts": style})
