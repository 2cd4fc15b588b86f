"""Models that are divided in tests, and how a divided model is compared with the whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.private.torch import tree_map
from lightning_parallel.tensor.plan import find_plan
from lightning_parallel.tensor.sharding import Sharding, shard_module
from recipes.models.classifier import MLP, LeNet
from recipes.models.gpt import GPT
from tests.tensor.helpers import close, world

ADAM = {"_target_": "torch.optim.AdamW"}
VOCABULARY = 11  # no group divides it
TIME = 12
Make = Callable[..., nn.Module]


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
MOE: dict[str, Any] = LLAMA | {"num_experts_per_tok": 2, "output_router_logits": False}
LATENT: dict[str, Any] = {  # DeepSeek's attention
    "kv_lora_rank": 6, "q_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "moe_intermediate_size": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "head_dim": 2,
}  # fmt: skip

llama = partial(of_transformers, "Llama", **LLAMA)
qwen3 = partial(of_transformers, "Qwen3", **LLAMA)
phi3 = partial(of_transformers, "Phi3", **LLAMA, resid_pdrop=0.0, embd_pdrop=0.0)
gpt2 = partial(
    of_transformers, "GPT2", "LMHeadModel", n_layer=2, n_embd=12, n_head=6, vocab_size=VOCABULARY, n_positions=TIME,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
)  # fmt: skip
gpt = partial(GPT, optimizer=ADAM, vocab_size=VOCABULARY, context=TIME, layers=2, heads=12, width=24)
mlp = partial(MLP, optimizer=ADAM, features=6, classes=5, width=10)
lenet = partial(LeNet, optimizer=ADAM)

# Divided by the plans that they bring, or that are shipped. tests/zoo has many more.
PLANNED: dict[str, Make] = {
    "llama": llama, "qwen3": qwen3, "phi3": phi3, "gpt2": gpt2, "gpt": gpt, "mlp": mlp, "lenet": lenet,
}  # fmt: skip
EXPERTS: dict[str, Make] = {
    "mixtral": partial(of_transformers, "Mixtral", **MOE | {"num_local_experts": 4, "intermediate_size": 13}),
    "deepseek_v3": partial(of_transformers, "DeepseekV3", **MOE | LATENT),
    "gpt_oss": partial(
        of_transformers, "GptOss", **MOE, num_local_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "longcat": partial(
        of_transformers, "LongcatFlash", **{name: each for name, each in (LLAMA | LATENT).items() if name not in (
            "intermediate_size", "num_hidden_layers", "first_k_dense_replace", "n_group"
        )}, ffn_hidden_size=12, expert_ffn_hidden_size=6, moe_topk=2, zero_expert_num=2, num_layers=1,
    ),
}  # fmt: skip


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
# Its attention gets slopes of all heads: only the MLPs are divided.
bloom = partial(of_transformers, "Bloom", vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=4)
# Divided by plans that are found by trying.
TRIED: dict[str, Make] = {
    "opt": opt, "net": Net, "bloom": bloom,
    # Its linear layers have a forward of their own. One key-value head for all queries: only the MLPs are divided.
    "falcon": partial(
        of_transformers, "Falcon", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4
    ),
}  # fmt: skip


class Loss(nn.Module):
    """``model`` with a loss around it, as a LightningModule has one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        output = self.model(inputs)
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class InDouble(TorchFunctionMode):
    """Routers and norms cast to float32, whose rounding would bound every comparison: here they cast to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    if isinstance(model, MLP | LeNet):
        shape = (4, 6) if isinstance(model, MLP) else (4, 1, 8, 8)
        return torch.randn(shape, generator=generator).double(), torch.randint(5, (4,), generator=generator)
    tokens = torch.randint(VOCABULARY, (2, TIME + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def seeded(make: Make, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = make(**options).double()
    for parameter in model.parameters():  # also norms and biases, which start as ones and zeros
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def sum_partial(module: nn.Module, sharding: Sharding, group: dist.ProcessGroup) -> None:
    for name in sharding.partial:
        gradient = module.get_parameter(name).grad
        if module.get_parameter(name).requires_grad:
            assert gradient is not None, name
            dist.all_reduce(gradient, group=group)


def agree(tensor: Tensor | None, group: dist.ProcessGroup, what: str) -> None:
    """Equal on all ranks, to the last bit: nothing to drift apart by."""
    if tensor is not None:
        others = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(others, tensor.contiguous(), group)
        assert all(torch.equal(other, tensor) for other in others), what


def trains_as_the_whole(make: Make, sequence_parallel: bool = False, **options: Any) -> None:
    """Train a model for three steps, whole and divided over the world by the plan that is found for it."""
    group, model = world(), seeded(make, **options)
    if make in EXPERTS.values():
        model.set_experts_implementation("eager")  # type: ignore[operator]  # kernels that know float64
    data = batch(model)
    whole, sharded = Loss(copy.deepcopy(model)), Loss(model)
    with InDouble():
        found = find_plan(model, count=group.size(), make_run=lambda: lambda: sharded(*data))
        plan = {f"model.{pattern}": style for pattern, style in found.items()}
        sharding = shard_module(sharded, plan, group, sequence_parallel=sequence_parallel)

        def compare(step: int) -> None:
            theirs = dict(whole.named_parameters(remove_duplicate=False))
            ours = dict(sharded.named_parameters(remove_duplicate=False))
            assert ours.keys() == theirs.keys()
            for name, parameter in ours.items():
                for what, mine, other in (
                    (f"step {step}: {name}.grad", parameter.grad, theirs[name].grad),
                    (f"step {step}: {name}", parameter.detach(), theirs[name].detach()),
                ):
                    is_cut = other is not None and name in sharding.shards
                    close(mine, sharding.shards[name].take(other) if is_cut and other is not None else other, what)
                    if not is_cut:
                        agree(mine, group, what)

        # A large eps: gradients that are zero but for rounding (a key's bias) would become steps of 1.
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1) for m in (whole, sharded)]
        for step in range(3):
            losses = []
            for m, optimizer in zip((whole, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(m(*data))
                losses[-1].backward()
            close(losses[1].detach(), losses[0].detach(), f"loss in step {step}")
            sum_partial(sharded, sharding, group)
            if step == 0:
                compare(step)
            for optimizer in optimizers:
                optimizer.step()
        compare(3)
