"""Sequence parallelism: blocks on pieces of the sequence, and what can't run on one refused.

That models train as the whole with it is shown in strategies/test_tensor.py.
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
from tests.pipeline.nets import Calls
from tests.tensor.helpers import ranks, world
from tests.tensor.models import TIME, Loss, batch, gpt, mlp
from tools.workers.pool import WorkerPool

CPU = torch.device("cpu")


def test_blocks_hold_pieces_and_attention_sees_all_of_the_sequence() -> None:
    model = gpt()
    shard_module(model, find_plan(model), ranks(3), sequence_parallel=True)
    make_absent(model, "", CPU)
    seen: dict[str, list[tuple[int, ...]]] = {}
    whole, piece = (2, TIME, 24), (2, TIME // 3, 24)
    expected = {
        "blocks.0.norm_attention": [piece, piece],
        "blocks.0.attention.qkv": [whole, (2, TIME, 72 // 3)],
        "blocks.0.attention": [piece, piece],
        "blocks.0.mlp.0": [whole, (2, TIME, 96 // 3)],
        "blocks.1": [piece, whole],
    }
    for name in expected:

        def look(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            seen[name] = [tuple(args[0].shape), tuple(output.shape)]

        model.get_submodule(name).register_forward_hook(look)
    Loss(model)(*batch())
    assert seen == expected
    # A part may run again by itself in the backward, of a batch of another size than the block's last one.
    attention: Any = model.get_submodule("blocks.0.attention")
    assert attention(absent_like(torch.empty(3, TIME // 3, 24), "an embedding")).shape == (3, TIME // 3, 24)


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
    for value in (*masks, *states, torch.get_rng_state()):
        both = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(both, value)
        assert torch.equal(*both) == (value.dtype is torch.uint8)  # a state
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    assert not torch.equal(states[0], states[1])


def test_dropout_differs_between_pieces(pool: WorkerPool) -> None:
    pool.run(dropout_differs_between_pieces_and_nowhere_else, 2)


# -- refusals ----------------------------------------------------------------------------------------------------

MLP_ONLY = {"blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row"}


def gpt_that(how: str) -> nn.Module:
    model: Any = gpt()
    if how == "shares a norm":
        model.norm = model.blocks[1].norm_mlp
    elif how == "has BatchNorm":
        model.blocks[1].norm_mlp = nn.BatchNorm1d(TIME)
    elif how == "repeats a block":
        model.blocks.append(model.blocks[0])
    return model


def nested() -> nn.Module:
    inner = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    return nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.Linear(4, 4), "inner": inner})})])


@pytest.mark.parametrize(("make", "plan", "message"), [
    (gpt, {"head": "column_gather"}, "needs blocks"),
    (mlp, None, r"no module .attention, MLP. between 'net.1.0' and the block 'net.1', before wh"),
    (gpt, MLP_ONLY | {"blocks.*.attention.out": "row_split"}, "out' has the style 'row_split', but inside of blo"),
    (gpt, MLP_ONLY, r"'blocks.0.attention' \(CausalSelfAttention\) is in a block, but not in the plan"),
    ("repeats a block", None, "'blocks' holds a block twice"),
    ("shares a norm", None, "'norm.weight' is shared with a block"),
    ("has BatchNorm", None, r"'blocks.1.norm_mlp' \(BatchNorm1d\) is in a block"),
    (
        nested, {"*.mlp.gate": "column", "*.mlp.inner.up": "column", "*.mlp.inner.down": "row"},
        "'0.mlp' holds column layers, and so does '0.mlp.inner' inside of it",
    ),
])  # fmt: skip
def test_blocks_that_cannot_run_on_a_piece_are_refused(
    make: Callable[[], nn.Module] | str, plan: dict[str, str] | None, message: str
) -> None:
    model = gpt_that(make) if isinstance(make, str) else make()
    with pytest.raises(ValueError, match=message):
        shard_module(model, plan or find_plan(model), ranks(2), sequence_parallel=True)


@pytest.mark.parametrize(("shapes", "message"), [
    ([(2, 9, 24)], "'blocks.0' got a sequence of 9 positions, which 2 tensor ranks don't divi"),
    ([(8, 24)], r"hidden state \[batch, sequence, features\], but it has the shape \(8, 24\)"),
    ([(2, 4, 10, 24)], r"features\], but it has the shape \(2, 4, 10, 24\)"),  # pieces of channels
    # The gradient of another one would be that of a piece.
    ([(2, 6, 24), (2, 7, 24)], r"'blocks.0' is called with a hidden state of shape \(2, 6, 24\) and with one"),
])  # fmt: skip
def test_hidden_states_of_other_shapes_are_refused(shapes: list[tuple[int, ...]], message: str) -> None:
    model: Any = gpt()
    shard_module(model, find_plan(model), ranks(2), sequence_parallel=True)
    with pytest.raises((ValueError, RuntimeError), match=message):
        model.blocks[0](*(torch.zeros(shape, requires_grad=True) for shape in shapes))


@pytest.mark.parametrize("windows", [True, False])
def test_blocks_that_rearrange_the_sequence_are_refused(windows: bool) -> None:
    """As a Swin's, whose attention gets windows for samples. Or only the first position."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = x.unflatten(1, (2, -1)).flatten(0, 1) if windows else x[:, :1]
        return x + m.mlp(y).reshape(x.shape[0], -1, 4)  # type: ignore[no-any-return]

    model = nn.Sequential(Calls(run, mlp=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))))
    shard_module(model, {"*.mlp.0": "column", "*.mlp.1": "row"}, ranks(2), sequence_parallel=True)
    make_absent(model, "", CPU)
    with pytest.raises(ValueError, match=r"'0.mlp' gets a tensor of shape .* the block rearranges it"):
        model(absent_like(torch.empty(2, 8, 4), "an embedding"))
