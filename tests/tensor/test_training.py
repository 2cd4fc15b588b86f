"""Divided models train as the whole model does: losses, gradients and weights, to rounding in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.ranks.shard import Shard
from lightning_parallel.tensor.dropout import ShardedRegion
from lightning_parallel.tensor.layer import ParallelLayer, Site, shard_parameter
from lightning_parallel.tensor.plan import find_plan
from lightning_parallel.tensor.rules import resolve
from lightning_parallel.tensor.sharding import shard_module
from lightning_parallel.tensor.style import Plan, Rule, Style
from tests.pool import WorkerPool
from tests.tensor.helpers import world
from tests.tensor.models import EXPERTS, PLANNED, TRIED, VOCABULARY, gpt2, llama, trains_as_the_whole
from tests.thorough import thorough

WIDTH, HIDDEN = 6, 10


# -- models with LoRA --------------------------------------------------------------------------------------------------

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


# -- styles of a user's own, and modules that stay whole in a sum ------------------------------------------------------


class Gain(nn.Module):
    """A factor and an offset for each feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(features))
        self.offset = nn.Parameter(torch.zeros(()))  # one for all, so it can't be divided

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


class ShardedGain(ParallelLayer):
    def _hold(self, whole: Gain, site: Site) -> None:
        super()._hold(whole, site)
        self.shards["factor"] = Shard.of(whole.factor.shape, 0, site.group)
        self.factor = shard_parameter(whole.factor, self.shards["factor"], site.shared)
        self.offset = whole.offset

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


class GainStyle(Style):
    """A gain on features that a column layer has left divided."""

    name = "gain"

    def check(self, rule: Rule) -> None:
        if not isinstance(rule.module, Gain):
            raise ValueError(rule.misfit(": it is for Gain."))

    def new_layer(self, rule: Rule, site: Site) -> nn.Module:
        return ShardedGain.of(rule.module, site)

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        assert isinstance(module, Gain)
        return [module.offset]


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.gain, self.down = nn.Linear(WIDTH, HIDDEN), Gain(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

    def configure_tensor_parallel(self) -> Plan:
        return {"up": "column", "gain": GainStyle(), "down": "row"}

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.gain(self.up(self.embedding(tokens)))))
        return out


class Scale(nn.Module):
    """What an identity expert is, with a parameter; its input comes by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, *, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class Mixture(nn.Module):
    """Divided matrices, and a module that stays whole, in one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH)), nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.kept = Scale()
        self.group = 2.0  # a name that is the module's own

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T + self.group * self.kept(hidden=x)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixture, self.head = nn.Embedding(VOCABULARY, WIDTH), Mixture(), nn.Linear(WIDTH, 11)

    def configure_tensor_parallel(self) -> Plan:
        return {"mixture": "experts:up=0,down=1", "mixture.kept": "divide_output"}

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.mixture(self.embedding(tokens)))
        return out


# -- the table ---------------------------------------------------------------------------------------------------------

MODELS = PLANNED | EXPERTS | TRIED | {
    "lora_llama": lora_llama, "lora_gpt2": lora_gpt2, "lora_saving_llama": lora_saving_llama, "gained": Gained,
    "mixed": Mixed,
}  # fmt: skip
# Grouped queries with fewer key-value heads than ranks.
ONE_HEAD = {"num_key_value_heads": 1}
Case = tuple[str, int, bool, dict[str, Any]]  # a model, ranks, along the sequence too, and options
CASES: list[Case] = [
    ("phi3", 2, False, {}),
    ("llama", 2, True, {**ONE_HEAD, "attention_bias": True}),
    ("gpt2", 2, False, {"tie_word_embeddings": True}),
    ("qwen3", 2, True, {}),
    ("lenet", 3, False, {}),
    ("gained", 3, False, {}),
    ("gpt", 3, True, {"tie_embeddings": True}),
    ("lora_llama", 4, False, {}),  # with fewer heads than ranks
    ("lora_gpt2", 2, False, {}),
    ("lora_saving_llama", 2, False, {}),
    ("mixed", 2, False, {}),
    *((name, 2, False, {}) for name in ("deepseek_v3", "gpt_oss")),  # the two that differ most
    ("net", 2, False, {}),
]
MORE: list[Case] = [
    *((name, 2, False, {}) for name in ("mixtral", "longcat", "opt", "bloom", "falcon", "mlp")),
    ("llama", 4, True, {**ONE_HEAD, "attention_bias": True}),
    ("gpt2", 2, True, {"tie_word_embeddings": False}),
    *(("gpt", ranks, tied, {"tie_embeddings": tied}) for ranks in (2, 4) for tied in (False, True)),
    ("lora_llama", 2, True, {}),
]


def train(name: str, sequence_parallel: bool, options: dict[str, Any]) -> None:
    trains_as_the_whole(MODELS[name], sequence_parallel, **options)


@pytest.mark.parametrize(("name", "size", "along_sequence", "options"), [*CASES, *thorough(*MORE)])
def test_divided_models_train_as_the_whole(
    pool: WorkerPool, name: str, size: int, along_sequence: bool, options: dict[str, Any]
) -> None:
    pool.run(train, size, name, along_sequence, options)


# -- adapters and styles -----------------------------------------------------------------------------------------------


def dropout_agrees() -> None:
    group = world()
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


def test_an_adapter_s_dropout_leaves_the_ranks_with_one_gradient(pool: WorkerPool) -> None:
    pool.run(dropout_agrees, 2)


def test_other_adapters_are_refused_by_name() -> None:
    model = adapted(llama(), ["q_proj"], use_dora=True)
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' is a Linear of PEFT with lora_magnitude"):
        resolve(model, find_plan(model))


def test_what_a_style_does_not_override_leaves_the_module_as_it_is() -> None:
    class Nothing(Style):
        pass

    style, module = Nothing.read(""), nn.Linear(2, 2)
    (rule,) = resolve(nn.Sequential(module), {"0": style})
    assert rule.style is style and style.text == "Nothing"
    assert style.partial_parameters(module) == []
    with pytest.raises(ValueError, match="takes no options"):
        Nothing.read("3")
    with pytest.raises(ValueError, match="plan: 'up': 'gain', but 'up' is a Linear"):
        resolve(Gained(), {"up": GainStyle()})
