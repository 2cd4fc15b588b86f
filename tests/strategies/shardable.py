"""LightningModules with plans, and heads for 2, 3 and 4 tensor ranks; vocabulary and widths that these don't divide."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_parallel.private.torch.tensors import tree_map
from tests.strategies.models import GPT2, TOKENS, Base, LeNet, Llama, OfTransformers, next_token_loss


class ShardableGPT2(GPT2):
    """It brings no plan; head tied to the embedding."""

    sizes = GPT2.sizes | {"n_embd": 24, "n_head": 12, "attn_implementation": "eager"}


class ShardableLlama(Llama):
    """By its own plan; grouped queries."""

    sizes = Llama.sizes | {
        "hidden_size": 24, "intermediate_size": 26, "num_attention_heads": 12, "num_key_value_heads": 6,
    }  # fmt: skip


class Lora(OfTransformers):
    """Adapted by PEFT: only the adapters are trained."""

    adapters: dict[str, Any] = {}

    def build(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().build()
        config = LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, **self.adapters)
        self.model = get_peft_model(self.model, config, autocast_adapter_dtype=False)


class LoraLlama(Lora, ShardableLlama):
    """In all its layers; two key-value heads."""

    sizes = ShardableLlama.sizes | {"num_key_value_heads": 2, "num_hidden_layers": 2}
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    adapters = {"target_modules": [*layers, "lm_head", "embed_tokens"]}


class LoraSavingLlama(LoraLlama):
    """With a head that is trained as a whole."""

    adapters = {"target_modules": LoraLlama.layers, "modules_to_save": ["lm_head"]}


class DroppingLoraLlama(LoraLlama):
    adapters = LoraLlama.adapters | {"lora_dropout": 0.5}


class LoraGPT2(Lora, ShardableGPT2):
    """In layers with transposed weights."""

    adapters = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}


class ShardablePhi3(Llama):
    """By its own plan; queries, keys and values in one layer, and so the two halves of the MLP."""

    kind = "Phi3ForCausalLM"
    sizes = ShardableLlama.sizes | {"num_hidden_layers": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "pad_token_id": 0}


class ShardableQwen3(Llama):
    """By its own plan; norms of queries and keys, whose gradients are summed."""

    kind = "Qwen3ForCausalLM"
    sizes = ShardableLlama.sizes | {"num_hidden_layers": 2, "head_dim": 2}


class PlanlessOPT(Llama):
    """A family without a plan: one is found."""

    kind = "OPTForCausalLM"
    sizes = {
        "hidden_size": 16, "ffn_dim": 26, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.0,
        "word_embed_proj_dim": 16, "max_position_embeddings": 16, "pad_token_id": 0,
    }  # fmt: skip


class InDouble(TorchFunctionMode):
    """Inside, routers that cast to float32, whose rounding would bound every comparison, cast to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class LatentExperts(Llama):
    """A mixture of experts, by its model's plan. Keys and values come from a narrow layer that all ranks compute."""

    kind = "DeepseekV3ForCausalLM"
    sizes = Llama.sizes | {
        "num_hidden_layers": 2, "num_experts_per_tok": 2, "kv_lora_rank": 6, "q_lora_rank": 6, "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4, "moe_intermediate_size": 6, "head_dim": 2,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip

    def build(self) -> None:
        super().build()
        self.model.set_experts_implementation("eager")  # whose kernels know float64

    def loss(self, batch: Any) -> Tensor:
        with InDouble():
            return super().loss(batch)


class Mixed(LeNet):
    """Convolutions and BatchNorm left whole, then linear layers by a plan of the module's own; one frozen."""

    def build(self) -> None:
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.mlp = nn.Sequential(nn.Linear(16, 15), nn.GELU(), nn.Linear(15, 14), nn.Linear(14, 13), nn.Tanh())
        self.mlp[2].weight.requires_grad_(False)
        self.head = nn.Linear(13, 10)

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"mlp.0": "column", "mlp.2": "row", "mlp.3": "column_gather", "head": "row_split"}

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.head(self.mlp(self.body(images))), labels)


class Own(nn.Linear):
    """A linear layer with a method of the user's."""

    def faster(self) -> float:
        return 2.0


class Asks(Mixed):
    """Code that asks a layer what it is, keeps it in a list, and groups parameters by attributes of theirs."""

    def build(self) -> None:
        self.up, self.down, self.head = Own(25, 14), nn.Linear(14, 24), nn.Linear(24, 10)
        self.up.gain, self.down.rate = 1.5, 3.0  # type: ignore[assignment]
        self.up.bias.decays = self.head.weight.decays = True  # type: ignore[attr-defined]
        self.pair = [self.up, self.down]

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].flatten(1)[:, :25]
        for layer in self.pair:
            x = torch.tanh(layer(x)) * getattr(layer, "gain", 1.0) if isinstance(layer, nn.Linear) else x
        return F.cross_entropy(self.head(x), batch[1])

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"up": "column", "down": "row"}

    def configure_optimizers(self) -> Any:
        layers = [layer for layer in self.modules() if isinstance(layer, nn.Linear)]
        groups = [
            {"params": [p], "lr": 0.01 * rate, "weight_decay": 0.5 * hasattr(p, "decays")}
            for layer in layers
            for rate in [layer.faster() if isinstance(layer, Own) else getattr(layer, "rate", 1.0)]
            for p in layer.parameters()
        ]
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.beta * x)


class Scaled(Mixed):
    """A number that is trained between the layers of a pair, whose output begins at zero."""

    style = {"scale": "sum_gradient"}

    def build(self) -> None:
        self.up, self.scale, self.down = nn.Linear(25, 14), Scale(), nn.Linear(14, 25)
        self.head = nn.Linear(25, 10)
        nn.init.zeros_(self.down.weight)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].flatten(1)[:, :25]
        return F.cross_entropy(self.head(x + self.down(self.scale(self.up(x)))), batch[1])

    def configure_tensor_parallel(self) -> dict[str, str]:
        return {"up": "column", "down": "row", **self.style}


class ScaledWithoutASum(Scaled):
    style: dict[str, str] = {}


class PenalisesShards(ShardableLlama):
    """An L2 penalty on parameters, most of which are divided."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-9 * sum(p.pow(2).sum() for p in self.parameters())


class DrawsByRank(ShardableLlama):
    """Noise on the loss from a generator that is seeded by rank."""

    def loss(self, batch: Any) -> Tensor:
        noise = torch.rand((), generator=torch.Generator().manual_seed(rank_zero_only.rank))
        return super().loss(batch) + 0.01 * noise


class DrawsInValidation(ShardableLlama):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + rank_zero_only.rank


class ByForward(ShardableLlama):
    """The head called by its forward, without hooks."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.model.model(input_ids=batch["input_ids"]).last_hidden_state
        return next_token_loss(self.model.lm_head.forward(hidden), batch["labels"], TOKENS)


SHARDABLE = {name: kind for name, kind in [*vars().items()] if isinstance(kind, type) and issubclass(kind, Base)}
