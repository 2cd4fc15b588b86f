"""Models that are divided in tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.tensor.layer import ParallelLayer, Site
from lightning_parallel.tensor_plans.style import Rule, Style
from recipes.models.classifier import MLP
from recipes.models.gpt import GPT

ADAM = {"_target_": "torch.optim.AdamW"}
VOCABULARY = 11  # no group divides it
TIME = 12


def of_transformers(name: str, kind: str = "ForCausalLM", **options: Any) -> nn.Module:
    import transformers  # takes seconds: only in the workers that need it

    model = getattr(transformers, name + kind)
    made: nn.Module = model(model.config_class(**options))
    return made


TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA: dict[str, Any] = TOKENS | {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": TIME, "use_cache": False, "attention_dropout": 0.0,
}  # fmt: skip

llama = partial(of_transformers, "Llama", **LLAMA)
gpt2 = partial(
    of_transformers, "GPT2", "LMHeadModel", n_layer=2, n_embd=12, n_head=6, vocab_size=VOCABULARY, n_positions=TIME,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
)  # fmt: skip
gpt = partial(GPT, optimizer=ADAM, vocab_size=VOCABULARY, context=TIME, layers=2, heads=12, width=24)
mlp = partial(MLP, optimizer=ADAM, features=6, classes=5, width=10)


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


opt = partial(
    of_transformers, "OPT", **TOKENS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=26,
    max_position_embeddings=2 * TIME, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0,
    activation_dropout=0.0,
)  # fmt: skip


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
    factor: nn.Parameter

    def __init__(self, whole: Gain, site: Site) -> None:
        super().__init__(whole, site)
        self.hold_shard("factor", whole.factor, 0)
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
        return ShardedGain(rule.module, site)

    def partial_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        assert isinstance(module, Gain)
        return [module.offset]


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.up, self.gain, self.down = nn.Linear(6, 10), Gain(10), nn.Linear(10, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.gain(self.up(self.embedding(tokens)))))
        return out


class Mixture(nn.Module):
    """Divided matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(10, 6)), nn.Parameter(torch.randn(6, 10))
        self.group = 2.0  # a name that is the module's own

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.T) @ self.down.T * self.group


class InSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixture, self.head = nn.Embedding(VOCABULARY, 6), Mixture(), nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.mixture(self.embedding(tokens)))
        return out


# -- around a model ----------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """``model`` with a loss around it, as a LightningModule has one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        output = self.model(inputs)
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, TIME + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]
