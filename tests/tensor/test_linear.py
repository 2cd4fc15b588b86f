"""Divided linear layers: the numbers of the whole layer, its checkpoint, its first weights; and few messages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import parametrizations
from torch.nn.utils.weight_norm import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from lightning_parallel.absent.tensor import AbsentTensor, absent_like
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from lightning_parallel.tensor.region import ShardedRegion
from lightning_parallel.tensor.whole_input import copy_linear
from tests.pool import WorkerPool

WORLD_SIZES = [2, 3, 4]
DOUBLE = torch.float64
IN, HIDDEN, OUT = 6, 10, 7  # 10 over 3 ranks: 4, 4, 2; over 4: 3, 3, 3, 1


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def alone(rank: int = 0, count: int = 1) -> dist.ProcessGroup:
    """A group that can't send: for what needs none."""
    return dist.ProcessGroup(rank, count)


def values(seed: int, *shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    """The same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on all ranks; their products and sums are exact, in any order, in bfloat16 too."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(seed: int, inputs: int, outputs: int, bias: bool = True, kind: str = "linear") -> nn.Module:
    layer: nn.Module = Conv1D(outputs, inputs) if kind == "conv1d" else nn.Linear(inputs, outputs, bias)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(values(10 * seed + i, *parameter.shape) * 0.3)
    return layer.to(DOUBLE)


def close(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None and b is not None and a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def same_gradients(layer: ParallelLinear, whole: nn.Module) -> None:
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert gradients.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        expected = gradients[name]
        assert expected is not None
        close(parameter.grad, layer.shards[name].take(expected) if name in layer.shards else expected)


def inputs() -> Iterator[Tensor]:
    """Of all ranks, and in the ways that views lie in memory."""
    yield values(1, 5, IN)
    yield values(2, IN)
    yield values(3, 2, 3, IN)
    yield values(4, 3, 2, IN).transpose(0, 1)
    yield values(5, 2, 3, 2 * IN)[..., ::2]
    yield values(6, IN).expand(3, IN)
    yield values(7, 0, IN)


# -- the numbers of the whole layer ------------------------------------------------------------------------------


def pair_equals_the_whole(kind: str, bias: bool) -> None:
    first, second = linear(1, IN, HIDDEN, bias, kind), linear(2, HIDDEN, OUT, bias, kind)
    column = ColumnParallelLinear.from_linear(first, group=world())
    row = RowParallelLinear.from_linear(second, group=world())
    contiguous: list[bool] = []  # what the weights accumulate: a gradient in another layout would be copied
    for parameter in (column.weight, row.weight):
        parameter.register_hook(lambda gradient: contiguous.append(gradient.is_contiguous()))
    for i, x in enumerate(inputs()):
        whole_x, x = x.clone().requires_grad_(), x.detach().requires_grad_()
        rows = whole_x.reshape(-1, IN)  # Conv1D refuses some views
        expected = second(torch.tanh(first(rows))).view(*x.shape[:-1], OUT)
        hidden = column(x)
        assert hidden.shape == (*x.shape[:-1], column.shards["weight"].size)
        y = row(torch.tanh(hidden))
        close(y, expected)
        g = values(50 + i, *y.shape) if i % 2 else torch.ones((), dtype=DOUBLE).expand_as(y)
        expected.backward(g)
        version = x._version
        y.backward(g)
        assert x._version == version
        close(x.grad, whole_x.grad)
    same_gradients(column, first)  # accumulated over the inputs
    same_gradients(row, second)
    assert contiguous and all(contiguous)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("kind", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
def test_a_pair_equals_the_whole_pair_in_output_and_every_gradient(
    pool: WorkerPool, kind: str, bias: bool, world_size: int
) -> None:
    pool.run(pair_equals_the_whole, world_size, kind, bias)


def alone_equals_the_whole(kind: str) -> None:
    for name in ("column", "row"):
        whole = linear(1, IN, HIDDEN, True, kind)
        layer: ParallelLinear
        if name == "column":
            layer = ColumnParallelLinear.from_linear(whole, group=world(), gather_output=True)
        else:
            layer = RowParallelLinear.from_linear(whole, group=world(), input_is_parallel=False)
        x, whole_x = values(1, 5, IN).requires_grad_(), values(1, 5, IN).requires_grad_()
        y, expected = layer(x), whole(whole_x)
        close(y, expected)
        y.backward(values(2, *y.shape))
        expected.backward(values(2, *y.shape))
        close(x.grad, whole_x.grad)
        same_gradients(layer, whole)


@pytest.mark.parametrize("world_size", WORLD_SIZES[:2])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_gathered_columns_and_a_row_that_splits_its_input_equal_the_whole_layer(
    pool: WorkerPool, kind: str, world_size: int
) -> None:
    pool.run(alone_equals_the_whole, world_size, kind)


def attention(qkv: nn.Module, out: nn.Module, x: Tensor, parts: list[int], head: int) -> Tensor:
    """Causal, grouped queries; ``parts`` are the sizes of q, k and v here."""
    q, k, v = (part.unflatten(-1, (-1, head)).transpose(1, 2) for part in qkv(x).split(parts, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    result: Tensor = out(y.transpose(1, 2).flatten(2))
    return result


def heads_stay_whole(key_value_heads: int) -> None:
    head, heads, count = 2, 12, dist.get_world_size()
    parts = (heads * head, key_value_heads * head, key_value_heads * head)
    first, second = linear(1, IN, sum(parts)), linear(2, heads * head, OUT)
    qkv = ColumnParallelLinear.from_linear(first, group=world(), parts=parts)
    out = RowParallelLinear.from_linear(second, group=world())
    x, whole_x = values(1, 2, 4, IN).requires_grad_(), values(1, 2, 4, IN).requires_grad_()
    y = attention(qkv, out, x, [size // count for size in parts], head)
    expected = attention(first, second, whole_x, list(parts), head)
    close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    close(x.grad, whole_x.grad)
    same_gradients(qkv, first)
    same_gradients(out, second)


@pytest.mark.parametrize(("world_size", "key_value_heads"), [(2, 12), (2, 6), (3, 6), (4, 4)])
def test_fused_attention_with_its_heads_divided_equals_the_whole(
    pool: WorkerPool, world_size: int, key_value_heads: int
) -> None:
    pool.run(heads_stay_whole, world_size, key_value_heads)


def sequence_pair_equals_the_whole(length: int) -> None:
    group = world()
    first, second = linear(1, IN, HIDDEN), linear(2, HIDDEN, OUT)
    column = ColumnParallelLinear.from_linear(first, group=group, copy_input=False)
    row = RowParallelLinear.from_linear(second, group=group, sequence_dim=1)
    x, whole_x = values(1, 2, length, IN).requires_grad_(), values(1, 2, length, IN).requires_grad_()
    own = functions.gather_sum(functions.split(x, 1, group), 1, group, length)
    y = row(torch.tanh(column(own)))
    assert y.shape[1] == functions.own_piece(x, 1, group).shape[1]
    y = functions.gather(y, 1, group, length)
    expected = second(torch.tanh(first(whole_x)))
    close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    close(x.grad, whole_x.grad)
    assert row.bias is not None and row.bias.grad is not None
    dist.all_reduce(row.bias.grad)  # of a piece of the sequence until then
    same_gradients(column, first)
    same_gradients(row, second)


@pytest.mark.parametrize(("world_size", "length"), [(2, 4), (3, 6), (2, 5)])
def test_between_sequence_pieces_the_pair_equals_the_whole(pool: WorkerPool, world_size: int, length: int) -> None:
    pool.run(sequence_pair_equals_the_whole, world_size, length)


def bias_is_added_once() -> None:
    row = RowParallelLinear(4, 3, group=world())
    with torch.no_grad():
        row.weight.zero_()
        row.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))  # type: ignore[union-attr]
    y = row(torch.ones(2, 2))
    assert y.tolist() == [[1.0, 2.0, 3.0]] * 2
    y.sum().backward()
    assert row.bias.grad.tolist() == [2.0, 2.0, 2.0]  # type: ignore[union-attr]


def test_the_bias_of_a_row_layer_is_added_once(pool: WorkerPool) -> None:
    pool.run(bias_is_added_once, 2)


# -- messages ----------------------------------------------------------------------------------------------------


def counted(mode: CommDebugMode) -> dict[str, int]:
    return {str(operation): count for operation, count in mode.get_comm_counts().items() if count}


def messages() -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    group, counts = world(), {}
    layers = {
        "column": (ColumnParallelLinear(4, 6, group=group), True),
        "column, gathered": (ColumnParallelLinear(4, 6, group=group, gather_output=True), True),
        "column, data": (ColumnParallelLinear(4, 6, group=group), False),
        "column, input not copied": (ColumnParallelLinear(4, 6, group=group, copy_input=False), True),
        "row": (RowParallelLinear(8, 6, group=group), True),
        "row, data": (RowParallelLinear(8, 6, group=group), False),
        "row, splits": (RowParallelLinear(4, 6, group=group, input_is_parallel=False), True),
        "row, sequence": (RowParallelLinear(8, 6, group=group, sequence_dim=0), True),
    }
    for name, (layer, wanted) in layers.items():
        x = torch.ones(2, 4, requires_grad=wanted)
        with CommDebugMode() as forward:
            y = layer(x)
        with CommDebugMode() as backward:
            y.sum().backward()
        counts[name] = (counted(forward), counted(backward))
    return counts


def test_a_layer_sends_one_message_in_the_direction_that_needs_it(pool: WorkerPool) -> None:
    reduced, joined, scattered = {"c10d.allreduce_": 1}, {"c10d.allgather_": 1}, {"c10d.reduce_scatter_": 1}
    assert pool.run(messages, 2)[0] == {
        "column": ({}, reduced),
        "column, gathered": (joined, reduced),
        "column, data": ({}, {}),
        "column, input not copied": ({}, {}),
        "row": (reduced, {}),
        "row, data": (reduced, {}),
        "row, splits": (reduced, joined),
        "row, sequence": (scattered, joined),
    }


class Events(TorchDispatchMode):
    """The order in which products and sums are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.sum):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def order_of_backward() -> list[str]:
    layer = ColumnParallelLinear(4, 6, group=world())
    y = layer(torch.ones(2, 4, requires_grad=True))
    events, all_reduce = Events(), dist.all_reduce

    def recorded(*args: Any, **kwargs: Any) -> Any:
        events.names.append("send")
        work = all_reduce(*args, **kwargs)

        def wait() -> None:
            events.names.append("wait")
            work.wait()

        return mock.Mock(wait=wait)

    with mock.patch.object(dist, "all_reduce", recorded), events:
        y.backward(torch.ones_like(y))
    return events.names


def test_the_input_gradient_is_on_its_way_while_the_weights_is_computed(pool: WorkerPool) -> None:
    assert pool.run(order_of_backward, 2) == [["mm", "send", "mm", "sum", "wait"]] * 2


def frozen() -> None:
    for frozen_names in (["weight"], ["bias"], ["weight", "bias"]):
        first, second = linear(1, IN, HIDDEN), linear(2, HIDDEN, OUT)
        for whole in (first, second):
            for name in frozen_names:
                getattr(whole, name).requires_grad_(False)
        column = ColumnParallelLinear.from_linear(first, group=world())
        row = RowParallelLinear.from_linear(second, group=world())
        x, whole_x = values(1, 5, IN).requires_grad_(), values(1, 5, IN).requires_grad_()
        hidden = column(x)
        assert (hidden.grad_fn.saved_tensors[0] is None) == ("weight" in frozen_names)
        y, expected = row(torch.tanh(hidden)), second(torch.tanh(first(whole_x)))
        y.square().sum().backward()
        expected.square().sum().backward()
        close(x.grad, whole_x.grad)
        for layer, whole in ((column, first), (row, second)):
            for name, parameter in layer.named_parameters():
                assert parameter.requires_grad == (name not in frozen_names)
                assert (parameter.grad is None) == (name in frozen_names)
                if parameter.grad is not None:
                    expected_grad = getattr(whole, name).grad
                    close(
                        parameter.grad,
                        layer.shards[name].take(expected_grad) if name in layer.shards else expected_grad,
                    )


def test_frozen_weights_get_no_gradient_keep_no_input_and_let_the_inputs_gradient_through(pool: WorkerPool) -> None:
    pool.run(frozen, 2)


def second_derivatives() -> None:
    column, row = ColumnParallelLinear(4, 4, group=world()), RowParallelLinear(8, 4, group=world())
    x = torch.ones(2, 4, requires_grad=True)
    for gradient_depends in (False, True):  # on x: without, the result would be a constant, without a word
        y = column(x).square() if gradient_depends else column(x)
        with pytest.raises(RuntimeError, match="ColumnParallelLinear has no second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(row(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize("function", [
    lambda x: copy_linear(x, torch.ones(5, 4), torch.ones(5), alone()),
    lambda x: functions.gather(x.to("meta"), -1, alone(0, 2)),
])  # fmt: skip
def test_outputs_may_be_changed_in_place(function: Any) -> None:
    assert function(torch.ones(2, 3, 4, requires_grad=True)).relu_().requires_grad


def test_a_copy_that_shares_memory_may_not_be_changed_in_place() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="in-?place"):  # else the gradients of other uses of x would be wrong
        functions.copy(x, alone(0, 2)).relu_()


def test_a_second_derivative_is_refused(pool: WorkerPool) -> None:
    pool.run(second_derivatives, 2)


# -- precision ---------------------------------------------------------------------------------------------------


def autocast(kind: str, dtype: torch.dtype) -> None:
    """Integers: equal, not close."""
    whole = linear(0, 4, 6, kind=kind).to(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(whole.parameters()):
            parameter.copy_(integers(i, *parameter.shape))
    layers: list[ParallelLinear] = [
        ColumnParallelLinear.from_linear(whole, group=world(), gather_output=True),
        RowParallelLinear.from_linear(whole, group=world(), input_is_parallel=False),
    ]
    for layer in layers:
        for input_dtype in {dtype, torch.float64 if dtype == torch.float64 else torch.bfloat16}:
            x, whole_x = (integers(5, 3, 4, dtype=input_dtype).requires_grad_() for _ in range(2))
            whole.zero_grad()
            layer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y, expected = layer(x), whole(whole_x)
            assert y.dtype == expected.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
            assert torch.equal(y, expected)
            g = integers(6, 3, 6, dtype=y.dtype)
            y.backward(g)
            expected.backward(g)
            close(x.grad, whole_x.grad)
            same_gradients(layer, whole)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_under_autocast_dtypes_and_numbers_are_those_of_the_whole_layer(
    pool: WorkerPool, dtype: torch.dtype, kind: str
) -> None:
    pool.run(autocast, 2, kind, dtype)


# -- parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_weights_are_slices_of_the_whole_layers_and_the_generator_goes_on_as_after_it(
    count: int, dtype: torch.dtype
) -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        for bias in (True, False):
            torch.manual_seed(3)
            whole = nn.Linear(HIDDEN, HIDDEN, bias, dtype=dtype)
            after = torch.get_rng_state()
            torch.manual_seed(3)
            again = nn.Linear(HIDDEN, HIDDEN, bias, dtype=dtype)
            again.reset_parameters()
            for rank in range(count):
                torch.manual_seed(3)
                layer = kind(HIDDEN, HIDDEN, bias, group=alone(rank, count), dtype=dtype)
                assert torch.equal(torch.get_rng_state(), after)
                for wanted in (whole, again):
                    for name, parameter in wanted.named_parameters():
                        part = layer.shards[name].take(parameter) if name in layer.shards else parameter
                        assert torch.equal(getattr(layer, name), part)
                    layer.reset_parameters()
                    assert dict(layer.named_parameters()).keys() == dict(whole.named_parameters()).keys()


@pytest.mark.gpu
def test_first_weights_on_a_gpu_are_slices_too() -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(3)
        whole = nn.Linear(HIDDEN, HIDDEN, device="cuda")
        after = torch.cuda.get_rng_state()
        for rank in range(3):
            torch.manual_seed(3)
            layer = kind(HIDDEN, HIDDEN, group=alone(rank, 3), device="cuda")
            assert torch.equal(torch.cuda.get_rng_state(), after)
            assert torch.equal(layer.weight, layer.shards["weight"].take(whole.weight))


def test_names_in_checkpoints_are_those_of_the_whole_layer() -> None:
    for bias in (True, False):
        whole = nn.Linear(4, 6, bias).state_dict()
        column, row = (
            ColumnParallelLinear(4, 6, bias, group=alone(1, 2)),
            RowParallelLinear(4, 6, bias, group=alone(1, 2)),
        )
        assert list(column.state_dict()) == list(row.state_dict()) == list(whole)
        for layer in (column, row):
            assert layer.shards.keys() == ({"weight", "bias"} & whole.keys() if layer is column else {"weight"})
            for name, shard in layer.shards.items():
                assert shard.shape == whole[name].shape
                assert layer.state_dict()[name].shape == shard.take(whole[name]).shape


def test_a_layer_made_from_another_keeps_orientation_dtype_mode_and_what_trains() -> None:
    for whole in (nn.Linear(4, 6, dtype=torch.bfloat16), Conv1D(6, 4).bfloat16()):
        whole.eval()
        whole.bias.requires_grad_(False)
        before = {name: value.clone() for name, value in whole.state_dict().items()}
        for kind, dim in ((ColumnParallelLinear, 0), (RowParallelLinear, 1)):
            layer = kind.from_linear(whole, group=alone(1, 2))
            assert (layer.in_features, layer.out_features) == (4, 6)
            assert not layer.training
            assert layer.weight.dtype == torch.bfloat16
            assert layer.weight.requires_grad and layer.bias is not None and not layer.bias.requires_grad
            assert layer.shards["weight"].dim == (dim if isinstance(whole, nn.Linear) else 1 - dim)
            assert layer.shards["weight"].shape == whole.weight.shape
            assert torch.equal(layer.weight, layer.shards["weight"].take(whole.weight))
        for name, value in whole.state_dict().items():
            assert torch.equal(value, before[name])


def tied_layers() -> None:
    first, second = linear(1, IN, IN), linear(2, IN, IN)
    second.weight = first.weight
    shared: dict[int, nn.Parameter] = {}
    layers = [
        ColumnParallelLinear.from_linear(x, group=world(), shared=shared, gather_output=True) for x in (first, second)
    ]
    assert layers[0].weight is layers[1].weight and layers[0].bias is not layers[1].bias
    y, expected = values(1, 3, IN), values(1, 3, IN)
    for layer, whole in zip(layers, (first, second), strict=True):
        y, expected = torch.tanh(layer(y)), torch.tanh(whole(expected))
    y.sum().backward()
    expected.sum().backward()
    for layer, whole in zip(layers, (first, second), strict=True):
        same_gradients(layer, whole)
    clones = copy.deepcopy(nn.Sequential(*layers))
    assert clones[0].weight is clones[1].weight is not layers[0].weight


def test_tied_layers_stay_tied_and_sum_their_gradients(pool: WorkerPool) -> None:
    pool.run(tied_layers, 2)


def test_tied_layers_that_are_cut_in_two_ways_are_refused() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    shared: dict[int, nn.Parameter] = {}
    ColumnParallelLinear.from_linear(first, group=alone(0, 2), shared=shared)
    with pytest.raises(ValueError, match="tied"):
        RowParallelLinear.from_linear(second, group=alone(0, 2), shared=shared)


def swapped_parameters() -> None:
    """What an asynchronous pipeline does: leaves for a step, in the place of the parameters."""
    layer, row = ColumnParallelLinear(4, 6, group=world()), RowParallelLinear(8, 6, group=world())
    for module in (layer, row):
        leaves = {name: p.data.detach().requires_grad_() for name, p in module.named_parameters()}
        x = torch.ones(2, 4, requires_grad=True)
        y = torch.func.functional_call(module, leaves, x)
        module.weight.data = module.weight.data + 1  # a new version; the old one is still in use
        y.sum().backward()
        expected = leaves["weight"].sum(0).expand(2, 4).clone()
        if module is layer:
            dist.all_reduce(expected)
        torch.testing.assert_close(x.grad, expected)
        assert all(leaf.grad is not None for leaf in leaves.values())
        assert all(p.grad is None for p in module.parameters())

        y = module(torch.ones(2, 4, requires_grad=True))
        with torch.no_grad():
            module.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_weights_of_the_forward_are_those_of_the_backward(pool: WorkerPool) -> None:
    pool.run(swapped_parameters, 2)


def copies() -> None:
    for layer in (ColumnParallelLinear(4, 6, group=world()), RowParallelLinear(8, 6, group=world())):
        twin = copy.deepcopy(layer)
        assert type(twin) is type(layer) and twin.group is layer.group and twin.shards == layer.shards
        assert twin.weight is not layer.weight and twin._forward_hooks is not layer._forward_hooks
        x = torch.ones(2, 4)
        assert torch.equal(twin(x), layer(x))
        with torch.no_grad():
            twin.weight.zero_()
        assert layer.weight.any()
        with pytest.raises(TypeError, match="belongs to a process group. Save its state_dict"):
            pickle.dumps(layer)


def test_a_copy_shares_the_group_and_no_parameter_and_pickling_says_what_to_do_instead(pool: WorkerPool) -> None:
    pool.run(copies, 2)


# -- as one rank, without memory, at the edges of a region -------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_one_rank_computes_exactly_the_whole_layer(kind: str) -> None:
    whole = linear(1, IN, OUT, kind=kind)
    region = mock.Mock()
    x = values(1, 5, IN).requires_grad_()
    layers: list[ParallelLinear] = [
        ColumnParallelLinear.from_linear(whole, group=alone(), region=region),
        ColumnParallelLinear.from_linear(whole, group=alone(), gather_output=True),
        RowParallelLinear.from_linear(whole, group=alone(), region=region),
        RowParallelLinear.from_linear(whole, group=alone(), input_is_parallel=False, sequence_dim=0),
    ]
    for layer in layers:
        assert torch.equal(layer(x), whole(x))
    assert not region.mock_calls


def without_memory() -> None:
    group = world()
    cases: list[tuple[ParallelLinear, int, tuple[int, ...]]] = [
        (ColumnParallelLinear(4, 6, group=group), 4, (2, 3, 3)),
        (ColumnParallelLinear(4, 6, group=group, gather_output=True), 4, (2, 3, 6)),
        (RowParallelLinear(8, 6, group=group), 4, (2, 3, 6)),
        (RowParallelLinear(8, 6, group=group, input_is_parallel=False), 8, (2, 3, 6)),
        (RowParallelLinear(8, 6, group=group, sequence_dim=0), 4, (1, 3, 6)),
    ]
    for layer, size, shape in cases:
        like = torch.empty(2, 3, size)
        absent = [absent_like(like, "elsewhere"), absent_like(like, "elsewhere").requires_grad_()]
        for x in [*absent, torch.empty(2, 3, size, device="meta", requires_grad=True)]:
            module = layer if isinstance(x, AbsentTensor) else copy.deepcopy(layer).to("meta")
            with CommDebugMode() as mode:
                y = module(x)
                torch.autograd.backward(y, torch.empty_like(y))
            assert y.shape == shape and y.device == x.device and y.dtype == x.dtype
            assert not x.requires_grad or x.grad is not None and x.grad.shape == x.shape
            assert mode.get_total_counts() == 0
        for parameter in ("weight", "bias"):  # the layer is elsewhere, its input is here
            setattr(layer, parameter, nn.Parameter(absent_like(getattr(layer, parameter).detach(), "elsewhere")))
        with CommDebugMode() as mode:
            y = layer(like)
        assert isinstance(y, AbsentTensor) and y.shape == shape
        assert mode.get_total_counts() == 0


def test_tensors_without_memory_get_their_shapes_and_send_nothing(pool: WorkerPool) -> None:
    pool.run(without_memory, 2)


def region_borders() -> None:
    region = mock.Mock()
    options: dict[str, Any] = {"group": world(), "region": region}
    x = torch.ones(2, 4)

    def calls(layer: nn.Module) -> list[str]:
        region.reset_mock()
        layer(x)
        return [name for name, *_ in region.mock_calls]

    assert calls(ColumnParallelLinear(4, 6, **options)) == ["enter"]
    assert calls(ColumnParallelLinear(4, 6, **options).eval()) == []
    assert calls(ColumnParallelLinear(4, 6, gather_output=True, **options)) == []
    assert calls(RowParallelLinear(8, 6, **options)) == ["leave"]
    kept = ShardedRegion(0, torch.device("cpu"))
    assert copy.deepcopy(ColumnParallelLinear(4, 6, group=world(), region=kept)).region is kept


def test_a_region_is_entered_after_columns_in_training_and_left_before_rows(pool: WorkerPool) -> None:
    pool.run(region_borders, 2)


def test_extra_repr_tells_local_and_whole_sizes() -> None:
    assert repr(ColumnParallelLinear(64, 256, group=alone(0, 2))) == (
        "ColumnParallelLinear(in_features=64, out_features=256 (128 here), bias=True, gather_output=False)"
    )
    assert repr(RowParallelLinear.from_linear(Conv1D(64, 256), group=alone(2, 3))) == (
        "RowParallelLinear(in_features=256 (84 here), out_features=64, bias=True, input_is_parallel=True)"
    )


# -- refusals ----------------------------------------------------------------------------------------------------


class Clamped(nn.Linear):
    """Computes the same for small values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1e3, 1e3)


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class MoreState(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


class PlainSubclass(nn.Linear):
    pass


def hooked(register: str) -> nn.Module:
    layer = nn.Linear(4, 4)
    getattr(layer, register)(lambda *args, **kwargs: None)
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


REFUSED = {
    "hooks": [
        hooked(f"register_{name}")
        for name in (
            "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook",
            "state_dict_post_hook", "state_dict_pre_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook",
        )
    ]
    + [nn.LazyLinear(4)],
    "parametrization": [parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4))],
    "MultiheadAttention": [nn.MultiheadAttention(4, 2).out_proj],
    "not nn.Linear, nor": [nn.Embedding(4, 4), nn.Conv1d(4, 4, 1), nn.Identity()],
    "OwnForward .*forward of its own": [OwnForward(4, 4)],
    "Clamped .*forward of its own": [Clamped(4, 4)],
    "forward replaced": [patched()],
    r"more than a weight and a bias \(scale\)": [MoreState()],
}  # fmt: skip


@pytest.mark.parametrize("problem", REFUSED)
def test_a_layer_that_is_more_than_linear_is_refused_by_name(problem: str) -> None:
    for layer in REFUSED[problem]:
        for kind in (ColumnParallelLinear, RowParallelLinear):
            with pytest.raises(ValueError, match=problem) as error:
                kind.from_linear(layer, group=alone(0, 2))
            assert type(layer).__name__ in str(error.value)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_the_old_weight_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_norm"):
        ColumnParallelLinear.from_linear(weight_norm(nn.Linear(4, 4)), group=alone(0, 2))


def test_a_subclass_that_computes_the_same_is_taken() -> None:
    assert ColumnParallelLinear.from_linear(PlainSubclass(4, 4), group=alone(0, 2)).weight.shape == (2, 4)


def test_sizes_that_leave_a_rank_without_work_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="5 can't be divided over 4 tensor ranks"):
        ColumnParallelLinear(3, 5, group=alone(0, 4))
    with pytest.raises(ValueError, match="5 can't be divided over 4 tensor ranks"):
        RowParallelLinear(5, 3, group=alone(0, 4))
    with pytest.raises(ValueError, match=r"\(4, 4\) add up to 8, but dimension 0 has 9"):
        ColumnParallelLinear(3, 9, group=alone(0, 2), parts=(4, 4))


def test_gathering_fused_parts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gather_output=True with parts=\(4, 4\)"):
        ColumnParallelLinear(3, 8, group=alone(0, 2), parts=(4, 4), gather_output=True)
