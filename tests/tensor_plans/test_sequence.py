"""Sequence parallelism: blocks on pieces of the sequence, and what can't run on one refused.

That models train as the whole with it is shown in test_training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.absent.module import make_absent
from lightning_parallel.absent.tensor import absent_like
from lightning_parallel.tensor.dropout import ShardedRegion
from lightning_parallel.tensor_plans.plan import find_plan
from lightning_parallel.tensor_plans.sharding import shard_module
from tests.tensor.helpers import ranks, world
from tests.tensor.models import TIME, Loss, batch, gpt, mlp
from tools.workers.pool import WorkerPool

CPU = torch.device("cpu")


def shapes_of(model: nn.Module, names: list[str]) -> dict[str, list[tuple[int, ...]]]:
    """Filled, in a step, with the shapes of what the modules take and return."""
    seen: dict[str, list[tuple[int, ...]]] = {}
    for name in names:

        def look(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            hidden = [*args, *kwargs.values()][0]
            output = output if isinstance(output, Tensor) else output[0]
            seen[name] = [tuple(hidden.shape), tuple(output.shape)]

        model.get_submodule(name).register_forward_hook(look, with_kwargs=True)
    return seen


def test_blocks_hold_pieces_and_attention_sees_all_of_the_sequence() -> None:
    size = 3
    model = gpt()
    shard_module(model, find_plan(model), ranks(size), sequence_parallel=True)
    make_absent(model, "", CPU)
    names = ["blocks.0.norm_attention", "blocks.0.attention.qkv", "blocks.0.attention", "blocks.0.mlp.0", "blocks.1"]
    seen = shapes_of(model, names)
    Loss(model)(*batch())
    whole, piece = (2, TIME, 24), (2, TIME // size, 24)
    assert seen == {
        "blocks.0.norm_attention": [piece, piece],
        "blocks.0.attention.qkv": [whole, (2, TIME, 72 // size)],
        "blocks.0.attention": [piece, piece],
        "blocks.0.mlp.0": [whole, (2, TIME, 96 // size)],
        "blocks.1": [piece, whole],
    }


# -- with a pipeline ---------------------------------------------------------------------------------------------


def dropout_differs_between_pieces_and_nowhere_else() -> None:
    group = world()
    torch.manual_seed(0)
    model = gpt(dropout=0.5).double()
    region = ShardedRegion(group.rank(), CPU)
    shard_module(model, find_plan(model), group, sequence_parallel=True, region=region)
    masks: list[Tensor] = []
    states: list[Tensor] = []
    model.get_submodule("blocks.0.dropout").register_forward_hook(lambda m, x, y: masks.append((y == 0).double()))
    model.get_submodule("norm").register_forward_hook(lambda m, x, y: states.append(torch.get_rng_state()))
    for _ in range(2):
        Loss(model)(*batch()).backward()
        region.close()
    for mask in masks:
        both = [torch.empty_like(mask) for _ in range(2)]
        dist.all_gather(both, mask)
        assert not torch.equal(*both)
        assert 0.4 < mask.mean() < 0.6
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    for state in (*states, torch.get_rng_state()):
        both = [torch.empty_like(state) for _ in range(2)]
        dist.all_gather(both, state)
        assert torch.equal(*both)
    assert not torch.equal(states[0], states[1])


def test_dropout_differs_between_pieces(pool: WorkerPool) -> None:
    pool.run(dropout_differs_between_pieces_and_nowhere_else, 2)


# -- refusals ----------------------------------------------------------------------------------------------------

MLP_ONLY = {"blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row"}


def with_shared_norm() -> nn.Module:
    model = gpt()
    model.norm = model.get_submodule("blocks.1.norm_mlp")
    return model


def with_batch_norm() -> nn.Module:
    model = gpt()
    model.get_submodule("blocks.1").norm_mlp = nn.BatchNorm1d(TIME)
    return model


def repeated() -> nn.Module:
    model = gpt()
    model.blocks.append(model.blocks[0])  # type: ignore[operator,union-attr,index]
    return model


def nested() -> nn.Module:
    inner = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    return nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(4, 4), "inner": inner})})])


@pytest.mark.parametrize(
    ("make", "plan", "message"),
    [
        (gpt, {"head": "column_gather"}, "needs blocks"),
        (mlp, None, r"no module .attention, MLP. between 'net.1.0' and the block 'net.1', before wh"),
        (gpt, MLP_ONLY | {"blocks.*.attention.out": "row_split"}, "out' has the style 'row_split', but inside of blo"),
        (gpt, MLP_ONLY, r"'blocks.0.attention' \(CausalSelfAttention\) is in a block, but not in the plan"),
        (repeated, None, "'blocks' holds a block twice"),
        (with_shared_norm, None, "'norm.weight' is shared with a block"),
        (with_batch_norm, None, r"'blocks.1.norm_mlp' \(BatchNorm1d\) is in a block"),
        (
            nested, {"*.mlp.gate": "column", "*.mlp.inner.up": "column", "*.mlp.inner.down": "row"},
            "'0.mlp' holds column layers, and so does '0.mlp.inner' inside of it",
        ),
    ],
)  # fmt: skip
def test_blocks_that_cannot_run_on_a_piece_are_refused(
    make: Callable[[], nn.Module], plan: dict[str, str] | None, message: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        shard_module(model, plan or find_plan(model), ranks(2), sequence_parallel=True)


@pytest.mark.parametrize(("shape", "message"), [
    ((2, 10, 24), "'blocks.0' got a sequence of 10 positions, which 4 tensor ranks don't divi"),
    ((8, 24), r"hidden state \[batch, sequence, features\], but it has the shape \(8, 24\)"),
    ((2, 4, 10, 24), r"hidden state \[batch, sequence, features\], but it has the shape"),  # pieces of channels
])  # fmt: skip
def test_a_hidden_state_of_another_shape_is_refused(shape: tuple[int, ...], message: str) -> None:
    model = gpt()
    shard_module(model, find_plan(model), ranks(4), sequence_parallel=True)
    with pytest.raises(ValueError, match=message):
        model.get_submodule("blocks.0")(torch.zeros(shape))


class Rearranging(nn.Module):
    """As a Swin's block: its attention gets windows for samples."""

    def __init__(self, windows: bool) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.windows = windows

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(1, (2, -1)).flatten(0, 1) if self.windows else x[:, :1]
        return x + self.mlp(y).reshape(x.shape[0], -1, 4)


@pytest.mark.parametrize("windows", [True, False])
def test_blocks_that_rearrange_the_sequence_are_refused(windows: bool) -> None:
    model = nn.Sequential(Rearranging(windows))
    plan = {"*.mlp.0": "column", "*.mlp.1": "row"}
    shard_module(model, plan, ranks(2), sequence_parallel=True)
    make_absent(model, "", CPU)
    with pytest.raises(ValueError, match=r"'0.mlp' gets a tensor of shape .* the block rearranges it"):
        model(absent_like(torch.empty(2, 8, 4), "an embedding"))


def test_a_second_hidden_state_is_refused() -> None:
    """Its gradient would be that of a piece."""
    model = gpt()
    shard_module(model, find_plan(model), ranks(2), sequence_parallel=True)
    encoded = torch.zeros(2, 7, 24, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"'blocks.1' is called with a hidden state of shape \(2, 6, 24\) and with one"
    ):
        model.get_submodule("blocks.1")(torch.zeros(2, 6, 24), encoded)
