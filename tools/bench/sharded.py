"""What runs a model divided over two tensor ranks: this package's layers, DTensor, and collectives written out.

A contestant is made on every rank from the whole model, the same there, of which it keeps its share. Inputs and outputs
are whole. Each runs forward and backward a :meth:`~Contestant.step`, from an input that gets a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_parallel.ranks.shard import Shard as Cut
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.dropout import ShardedRegion
from lightning_parallel.tensor_plans.sharding import shard_module
from recipes.models.gpt import Block

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Contestant:
    """A model with its input.

    Attributes:
        model: from a tensor to another one of the same shape.
        parameters: of the model, here.
        x: the input, a leaf that requires a gradient.
    """

    model: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    x: Tensor

    @classmethod
    def of(cls, module: nn.Module, x: Tensor) -> Contestant:
        return cls(module, list(module.parameters()), x.clone().requires_grad_())

    def forward(self) -> Tensor:
        """The loss."""
        return self.model(self.x).square().mean()

    def step(self) -> Tensor:
        """Forward and backward, to fresh gradients: the loss."""
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.forward()
        loss.backward()
        return loss


# -- the models --------------------------------------------------------------------------------------------------


def mlp(width: int) -> nn.Sequential:
    """Eight linear layers with ReLU, the same numbers in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())))


def blocks(count: int, width: int, heads: int) -> nn.Sequential:
    """Blocks of a GPT, the same numbers in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, heads, dropout=0.0) for _ in range(count)))


def whole(model: nn.Sequential, x: Tensor) -> Contestant:
    """Nothing divided."""
    return Contestant.of(copy.deepcopy(model), x)


# -- this package ------------------------------------------------------------------------------------------------


def ours(model: nn.Sequential, x: Tensor, sequence_parallel: bool = False, region: bool = False) -> Contestant:
    """Divided by this package, by a plan.

    Args:
        model: of :func:`mlp` or :func:`blocks`.
        x: the whole input.
        sequence_parallel: divide what is between attention and MLP too.
        region: reseed for dropout inside of it, as the strategies do, which can't know that there is none.
    """
    model = copy.deepcopy(model)
    if isinstance(model[0], Block):
        plan = {"*.attention.qkv": "column:3", "*.attention.out": "row", "*.mlp.0": "column", "*.mlp.2": "row"}
    else:
        plan = {str(i): "row" if i % 4 else "column" for i in range(0, len(model), 2)}
    state = ShardedRegion(dist.get_rank(), CPU) if region else None
    shard_module(model, plan, _world(), sequence_parallel=sequence_parallel, region=state)
    return Contestant.of(model, x)


# -- DTensor -----------------------------------------------------------------------------------------------------


def theirs(model: nn.Sequential, x: Tensor, sequence_parallel: bool = False) -> Contestant:
    """Divided by torch's ``parallelize_module``; see :func:`ours`."""
    model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, ParallelStyle] = {}
    if isinstance(model[0], Block):
        for block in model:
            _interleave(block)
        row = RowwiseParallel(output_layouts=Shard(1)) if sequence_parallel else RowwiseParallel()
        plan = {"*.attention.qkv": ColwiseParallel(), "*.attention.out": row}
        plan |= {"*.mlp.0": ColwiseParallel(), "*.mlp.2": row}
    else:
        plan = {str(i): RowwiseParallel() if i % 4 else ColwiseParallel() for i in range(0, len(model), 2)}
    if sequence_parallel:
        gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan |= {"*.norm_attention": SequenceParallel(), "*.norm_mlp": SequenceParallel()}
        plan |= {"*.attention": gather, "*.mlp": gather}
    parallelize_module(model, mesh, plan)
    if sequence_parallel:
        pieces = PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        )
        parallelize_module(model, mesh, pieces)
    return Contestant.of(model, x)


def _interleave(block: nn.Module) -> None:
    """DTensor cuts the fused q, k, v as one matrix. Reordered to q0 k0 v0 q1 k1 v1, each rank gets its share of all."""
    assert isinstance(block, Block)
    qkv, count = block.attention.qkv, dist.get_world_size()
    with torch.no_grad():
        for parameter in qkv.parameters():
            parts = parameter.unflatten(0, (3, count, -1)).transpose(0, 1)
            parameter.copy_(parts.clone().flatten(0, 2))


# -- by hand -----------------------------------------------------------------------------------------------------


def by_hand(model: nn.Sequential, x: Tensor) -> Contestant:
    """``copy`` and ``reduce`` around ``F.linear``, without layers or anything that checks: what they could cost at
    best."""
    if isinstance(model[0], Block):
        parts = [_block(block) for block in model]
    else:
        parts = [_pair(model[i], model[i + 2]) for i in range(0, len(model), 4)]

    def run(x: Tensor) -> Tensor:
        for call, _ in parts:
            x = call(x)
        return x

    return Contestant(run, [p for _, parameters in parts for p in parameters], x.clone().requires_grad_())


_Part = tuple[Callable[[Tensor], Tensor], list[Tensor]]


def _pair(column: nn.Module, row: nn.Module) -> _Part:
    w1, b1, w2, b2 = parameters = [*_columns(column), *_rows(row)]
    group = _world()

    def call(x: Tensor) -> Tensor:
        hidden = F.relu(F.linear(functions.copy(x, group), w1, b1))
        return F.relu(functions.reduce(F.linear(hidden, w2), group) + b2)

    return call, parameters


def _block(block: nn.Module) -> _Part:
    assert isinstance(block, Block)
    group, width, head = _world(), block.norm_mlp.weight.shape, block.attention.head_size
    attention = [*_columns(block.attention.qkv, parts=3), *_rows(block.attention.out)]
    feed_forward = [*_columns(block.mlp[0]), *_rows(block.mlp[2])]
    norms = [
        p.detach().clone().requires_grad_()
        for norm in (block.norm_attention, block.norm_mlp)
        for p in (norm.weight, norm.bias)
    ]
    w1, b1, w2, b2 = attention
    w3, b3, w4, b4 = feed_forward

    def call(x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        inside = functions.copy(F.layer_norm(x, width, norms[0], norms[1]), group)
        q, k, v = F.linear(inside, w1, b1).view(batch, time, 3, -1, head).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, -1)
        x = x + (functions.reduce(F.linear(mixed, w2), group) + b2)
        inside = functions.copy(F.layer_norm(x, width, norms[2], norms[3]), group)
        return x + (functions.reduce(F.linear(F.gelu(F.linear(inside, w3, b3)), w4), group) + b4)

    return call, [*norms, *attention, *feed_forward]


def _columns(linear: nn.Module, parts: int = 1) -> list[Tensor]:
    assert isinstance(linear, nn.Linear)
    sizes = (linear.out_features // parts,) * parts
    return [_cut(p, 0, sizes) for p in (linear.weight, linear.bias)]


def _rows(linear: nn.Module) -> list[Tensor]:
    assert isinstance(linear, nn.Linear)
    return [_cut(linear.weight, 1, ()), linear.bias.detach().clone().requires_grad_()]


def _cut(parameter: Tensor, dim: int, parts: tuple[int, ...]) -> Tensor:
    return Cut.of(parameter.shape, dim, _world(), parts).take(parameter.detach()).requires_grad_()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
