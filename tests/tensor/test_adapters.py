"""PEFT's LoRA around layers that a plan divides trains as it does around the whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.tensor.plan import find_plan
from lightning_parallel.tensor.region import ShardedRegion
from lightning_parallel.tensor.rules import resolve
from lightning_parallel.tensor.sharding import shard_module
from tests.pool import WorkerPool
from tests.tensor.test_sharding import gpt2, llama, ranks, trains_as_the_whole

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def adapted(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False, **options)
    return get_peft_model(model, config).base_model.model  # type: ignore[arg-type, no-any-return]


def lora_llama(**options: Any) -> nn.Module:
    return adapted(llama(), [*ALL, "lm_head", "embed_tokens"], **options)


def lora_saving_llama() -> nn.Module:
    """With a head that is trained as a whole."""
    return adapted(llama(), ALL, modules_to_save=["lm_head"])


def lora_gpt2() -> nn.Module:
    return adapted(gpt2(), ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)


def lora_train_as_the_whole() -> None:
    group = dist.group.WORLD
    assert group is not None
    for sequence_parallel in (False, True):
        trains_as_the_whole(lora_llama, group, sequence_parallel)
    trains_as_the_whole(lora_gpt2, group, False)
    trains_as_the_whole(lora_saving_llama, group, False)


def test_lora_trains_as_around_whole_layers(pool: WorkerPool) -> None:
    """With queries, keys and values, row layers, a gathered head, an embedding; packed columns of Conv1D."""
    pool.run(lora_train_as_the_whole, 2)


def fewer_heads_train_as_the_whole() -> None:
    group = dist.group.WORLD
    assert group is not None
    trains_as_the_whole(lora_llama, group, False)


def test_lora_around_fewer_heads_than_ranks(pool: WorkerPool) -> None:
    pool.run(fewer_heads_train_as_the_whole, 4)


def dropout_agrees() -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model = lora_llama(lora_dropout=0.5).double().train()
    region = ShardedRegion(group.rank(), torch.device("cpu"))
    sharding = shard_module(model, find_plan(model), group, region=region)
    model(torch.arange(10).view(1, 10)).logits.pow(2).sum().backward()
    region.close()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in sharding.shards and name not in sharding.partial:
            mine, others = parameter.grad, [torch.empty_like(parameter) for _ in range(group.size())]
            assert mine is not None, name
            dist.all_gather(others, mine, group)
            torch.testing.assert_close(others[0], others[1], msg=lambda m, name=name: f"{name}: {m}")


def test_its_dropout_leaves_the_ranks_with_one_gradient(pool: WorkerPool) -> None:
    pool.run(dropout_agrees, 2)


def test_names_stay_and_tell_the_shards() -> None:
    model = lora_llama()
    names = list(dict(model.named_parameters()))
    sharding = shard_module(model, find_plan(model), ranks(2))
    assert list(dict(model.named_parameters())) == names
    attention = "model.layers.0.self_attn"
    assert sharding.shards[f"{attention}.q_proj.base_layer.weight"].dim == 0
    assert sharding.shards[f"{attention}.q_proj.lora_B.default.weight"].dim == 0
    assert f"{attention}.q_proj.lora_A.default.weight" not in sharding.shards
    assert sharding.shards[f"{attention}.o_proj.lora_A.default.weight"].dim == 1
    assert f"{attention}.o_proj.lora_B.default.weight" not in sharding.shards
    assert not model.get_parameter(f"{attention}.q_proj.base_layer.weight").requires_grad


def test_other_adapters_are_refused_by_name() -> None:
    model = adapted(llama(), ["q_proj"], use_dora=True)
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' is a Linear of PEFT with lora_magnitude"):
        resolve(model, find_plan(model))
