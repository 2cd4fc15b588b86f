"""A model sharded by a plan computes and trains what the whole model does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from lightning_parallel.absent.tensor import AbsentTensor, make_absent
from lightning_parallel.private.torch import tree_map
from lightning_parallel.tensor.linear import ColumnParallelLinear
from lightning_parallel.tensor.plan import find_plan
from lightning_parallel.tensor.region import ShardedRegion
from lightning_parallel.tensor.sharding import Sharding, shard_module
from recipes.models.classifier import MLP, LeNet
from recipes.models.gpt import GPT
from tests.pool import WorkerPool

ADAM = {"_target_": "torch.optim.AdamW"}
VOCABULARY = 11  # no group divides it
TIME = 12
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TIME, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip


class Ranks:
    """Stands for a group of ``size`` ranks where nothing is sent."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def ranks(size: int, rank: int = 0) -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", Ranks(size, rank))


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


# transformers takes seconds to import: only in the workers that need it.


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**LLAMA, **options))


def grouped() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **options}))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**LLAMA))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**LLAMA))


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**LLAMA, resid_pdrop=0.0, embd_pdrop=0.0))


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=12, n_head=6, vocab_size=VOCABULARY, n_positions=TIME, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False, **options,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt(**options: Any) -> nn.Module:
    return GPT(optimizer=ADAM, vocab_size=VOCABULARY, context=TIME, layers=2, heads=12, width=24, **options)


def mlp() -> nn.Module:
    return MLP(optimizer=ADAM, features=6, classes=5, width=10)


def lenet() -> nn.Module:
    return LeNet(optimizer=ADAM)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    if isinstance(model, MLP | LeNet):
        shape = (4, 6) if isinstance(model, MLP) else (4, 1, 8, 8)
        return torch.randn(shape, generator=generator).double(), torch.randint(5, (4,), generator=generator)
    tokens = torch.randint(VOCABULARY, (2, TIME + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def close(mine: Tensor | None, theirs: Tensor | None, what: str) -> None:
    assert (mine is None) == (theirs is None), what
    if mine is not None and theirs is not None:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def agree(tensor: Tensor | None, group: dist.ProcessGroup, what: str) -> None:
    """Equal on all ranks, to the last bit: nothing to drift apart by."""
    if tensor is not None:
        others = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(others, tensor.contiguous(), group)
        assert all(torch.equal(other, tensor) for other in others), what


def sum_partial(module: nn.Module, sharding: Sharding, group: dist.ProcessGroup) -> None:
    for name in sharding.partial:
        if not module.get_parameter(name).requires_grad:
            continue
        gradient = module.get_parameter(name).grad
        assert gradient is not None, name
        dist.all_reduce(gradient, group=group)


def seeded(make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = make(**options).double()
    for parameter in model.parameters():  # also norms and biases, which start as ones and zeros
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def trains_as_the_whole(
    make: Callable[..., nn.Module], group: dist.ProcessGroup, sequence_parallel: bool, **options: Any
) -> None:
    model = seeded(make, **options)
    data = batch(model)
    whole, sharded = Loss(copy.deepcopy(model)), Loss(model)
    found = find_plan(model, count=group.size(), make_run=lambda: lambda: sharded(*data))
    plan = {f"model.{pattern}": style for pattern, style in found.items()}
    sharding = shard_module(sharded, plan, group, sequence_parallel=sequence_parallel)

    def mine(name: str, tensor: Tensor | None) -> Tensor | None:
        return sharding.shards[name].take(tensor) if tensor is not None and name in sharding.shards else tensor

    def compare(step: int) -> None:
        theirs = dict(whole.named_parameters(remove_duplicate=False))
        ours = dict(sharded.named_parameters(remove_duplicate=False))
        assert ours.keys() == theirs.keys()
        for name, parameter in ours.items():
            what = f"{make.__name__}, {group.size()} ranks, {sequence_parallel=}, step {step}: {name}"
            close(parameter.grad, mine(name, theirs[name].grad), f"{what}.grad")
            close(parameter.detach(), mine(name, theirs[name].detach()), what)
            if name not in sharding.shards:
                agree(parameter.grad, group, f"{what}.grad")
                agree(parameter.detach(), group, what)

    # A large eps: gradients that are zero but for rounding (a key's bias) would become steps of 1.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1) for m in (whole, sharded)]
    for step in range(10):
        losses = []
        for m, optimizer in zip((whole, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(m(*data))
            losses[-1].backward()
        close(losses[1].detach(), losses[0].detach(), f"{make.__name__}: loss in step {step}")
        sum_partial(sharded, sharding, group)
        if step == 0:
            compare(step)
        for optimizer in optimizers:
            optimizer.step()
    compare(10)


def transformers_train_as_the_whole() -> None:
    group = dist.group.WORLD
    assert group is not None
    for make in (qwen2, phi3):
        trains_as_the_whole(make, group, False)
    for tied in (False, True):
        trains_as_the_whole(llama, group, tied, tie_word_embeddings=tied)
        trains_as_the_whole(gpt2, group, not tied, tie_word_embeddings=tied)
    for sequence_parallel in (False, True):
        trains_as_the_whole(qwen3, group, sequence_parallel)


def test_transformers_models_train_as_the_whole(pool: WorkerPool) -> None:
    """Llama (with fewer key-value heads), Qwen2, Qwen3, Phi3 by their own plans, GPT-2 by the one shipped."""
    pool.run(transformers_train_as_the_whole, 2)


def example_models_train_as_the_whole() -> None:
    rank = dist.get_rank()
    for size in (2, 3, 4):
        group = dist.new_group(list(range(size)))
        if rank < size:
            trains_as_the_whole(mlp, group, False)
            trains_as_the_whole(lenet, group, False)
            for tied in (False, True):
                trains_as_the_whole(gpt, group, tied, tie_embeddings=tied)


def test_example_models_train_as_the_whole(pool: WorkerPool) -> None:
    pool.run(example_models_train_as_the_whole, 4)


# -- what a rank holds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_holds_its_own_heads(rank: int) -> None:
    """Not everywhere the first block of them, which trains without an error."""
    whole = seeded(llama)
    sharded = copy.deepcopy(whole)
    sharding = shard_module(sharded, find_plan(sharded), ranks(2, rank))
    attention = "model.layers.1.self_attn"
    heads = whole.get_parameter(f"{attention}.q_proj.weight").view(4, 2, 8)[2 * rank : 2 * rank + 2]
    assert torch.equal(sharded.get_parameter(f"{attention}.q_proj.weight"), heads.reshape(4, 8))
    shared_head = whole.get_parameter(f"{attention}.k_proj.weight").view(2, 2, 8)[rank]
    assert torch.equal(sharded.get_parameter(f"{attention}.k_proj.weight"), shared_head)
    assert sharding.shards[f"{attention}.q_proj.weight"].shape == (8, 8)

    whole = seeded(gpt2)
    sharded = copy.deepcopy(whole)
    shard_module(sharded, find_plan(sharded), ranks(2, rank))
    attention = "transformer.h.1.attn"
    heads = whole.get_parameter(f"{attention}.c_attn.weight").view(12, 3, 6, 2)[:, :, 3 * rank : 3 * rank + 3]
    assert torch.equal(sharded.get_parameter(f"{attention}.c_attn.weight"), heads.reshape(12, 18))
    kept = sharded.get_submodule(attention)
    assert (kept.num_heads, kept.split_size, kept.head_dim) == (3, 6, 2)


def test_tied_layers_share_one_shard_under_both_names() -> None:
    model = seeded(gpt, tie_embeddings=True)
    sharding = shard_module(model, find_plan(model), ranks(2))
    assert model.get_parameter("head.weight") is model.get_parameter("token_embedding.weight")
    assert sharding.shards["head.weight"] == sharding.shards["token_embedding.weight"]
    assert sharding.shards.keys() <= dict(model.named_parameters(remove_duplicate=False)).keys()


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)


def test_a_layer_with_two_names_is_replaced_under_both_by_one() -> None:
    model = Twice()
    sharding = shard_module(model, {"first": "column"}, ranks(2))
    assert model.first is model.second and model.first.weight.shape == (2, 4)
    assert sharding.shards.keys() == {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_fused_parts_of_given_sizes_are_divided_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(3, 8, bias=False))
    rows = model[0].weight.detach().clone()
    shard_module(model, {"0": "column:4,2,2"}, ranks(2, 1))
    assert torch.equal(model.get_parameter("0.weight"), rows[[2, 3, 5, 7]])


def test_partial_gradients_are_those_of_replicated_modules_between_sharded_ones() -> None:
    model = qwen3()
    norms = tuple(f"model.layers.{i}.self_attn.{n}_norm.weight" for i in (0, 1) for n in "qk")
    assert shard_module(model, find_plan(model), ranks(2)).partial == norms


@pytest.mark.parametrize("make", [llama, gpt2, gpt, lenet])
def test_a_sharded_model_passes_absent_tensors(make: Callable[..., nn.Module]) -> None:
    """As a pipeline surveys it: right shapes, and no messages."""
    model = make().double()
    sharding = shard_module(model, find_plan(model), ranks(2), sequence_parallel=make is not lenet)
    assert sharding.shards
    make_absent(model, str, torch.device("cpu"))
    loss = Loss(model)(*batch(model))
    assert isinstance(loss, AbsentTensor) and loss.shape == ()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_tell_the_region_unless_their_block_does(sequence_parallel: bool) -> None:
    model = nn.ModuleDict({"gpt": gpt(), "up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    plan = {f"gpt.{pattern}": style for pattern, style in find_plan(model["gpt"]).items()}
    region = ShardedRegion(0, torch.device("cpu"))
    options = {"sequence_parallel": sequence_parallel, "region": region}
    shard_module(model, plan | {"up": "column", "down": "row"}, ranks(2), **options)  # type: ignore[arg-type]
    told = {name for name, layer in model.named_modules() if getattr(layer, "region", None) is region}
    blocks = {f"gpt.blocks.{i}.{end}" for i in (0, 1) for end in ("attention.qkv", "attention.out", "mlp.0", "mlp.2")}
    assert told - {"gpt.head"} == {"up", "down"} | (set() if sequence_parallel else blocks)


def test_layers_that_a_user_sharded_are_reported_without_a_plan() -> None:
    model = nn.Sequential(ColumnParallelLinear(4, 6, group=ranks(2)))
    sharding = shard_module(model, find_plan(model), ranks(2))
    assert {name: shard.shape for name, shard in sharding.shards.items()} == {"0.weight": (6, 4), "0.bias": (6,)}


# -- refusals ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv = nn.Linear(8, 24)


@pytest.mark.parametrize(
    ("make", "plan", "size", "message"),
    [
        (lambda: grouped(), {}, 6, "k_proj' has 4 key-value heads .of 2., which can't be shared out over 6 tensor"),
        (lambda: llama(), {}, 3, "q_proj' has 4 query heads .of 2., which can't be shared out over 3 tensor ranks"),
        (lambda: gpt2(), {}, 4, "attn' has num_heads=6, which can't be shared out over 4 tensor ranks"),
        (lambda: gpt(), {}, 8, "qkv' has 12 attention heads .of 2., which can't be shared out over 8 tensor ranks"),
        (lambda: nn.Sequential(Attention()), {"0.qkv": "column:3"}, 2, "keeps num_heads=4: add '0': 'divide:num_he"),
        (lambda: nn.Sequential(nn.Linear(3, 24)), {"0": "column:5"}, 2, "'0': 24 output features aren't 5 equal"),
        (lambda: nn.Sequential(nn.Linear(3, 24)), {"0": "column:8,8"}, 2, "'0': Parts of sizes .8, 8. add up to 16"),
        (lambda: nn.Sequential(nn.Linear(3, 5)), {"0": "column"}, 4, "'0': '0': A dimension of 5 can't be divided"),
        (lambda: gpt(tie_embeddings=True), {"head": "column_gather"}, 2, "the same parameter as 'token_embedding.weig"),
        (
            lambda: gpt(tie_embeddings=True), {"head": "row_split", "token_embedding": "embedding"}, 2,
            "'token_embedding': A tied parameter of shape .11, 24. can't be divided in two ways",
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_and_left_as_it_was(
    make: Callable[[], nn.Module], plan: dict[str, str], size: int, message: str
) -> None:
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        shard_module(model, plan or find_plan(model), ranks(size))
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert all(getattr(m, "num_heads", 4) in (4, 6) for m in model.modules())


def test_a_parametrized_row_layer_is_refused_in_words() -> None:
    model = nn.Sequential(nn.Linear(4, 8), parametrizations.weight_norm(nn.Linear(8, 4)))
    with pytest.raises(ValueError, match="can't be divided over tensor ranks: it has a parametrization"):
        shard_module(model, {"0": "column", "1": "row"}, ranks(2))


def test_a_model_is_sharded_once() -> None:
    model = gpt()
    plan = find_plan(model)
    shard_module(model, plan, ranks(2))
    with pytest.raises(RuntimeError, match="'token_embedding' is a VocabParallelEmbedding: it is divided already"):
        shard_module(model, plan, ranks(2))
