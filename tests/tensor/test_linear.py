"""Divided linear layers: the numbers of the whole layer, its checkpoint, its first weights; and few messages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.weight_norm import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from lightning_parallel.absent.tensor import AbsentTensor, absent_like
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.dropout import ShardedRegion
from lightning_parallel.tensor.layer import Site
from lightning_parallel.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear, copy_linear
from tests.pool import WorkerPool
from tests.tensor.helpers import Messages, close, integers, ranks, values, world

IN, HIDDEN, OUT = 6, 10, 7  # 10 over 3 ranks: 4, 4, 2; over 4: 3, 3, 3, 1
KINDS: tuple[type[ColumnParallelLinear] | type[RowParallelLinear], ...] = (ColumnParallelLinear, RowParallelLinear)


def linear(seed: int, inputs: int, outputs: int, bias: bool = True, kind: str = "linear") -> nn.Module:
    layer: nn.Module = Conv1D(outputs, inputs) if kind == "conv1d" else nn.Linear(inputs, outputs, bias)
    layer = layer.double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(values(10 * seed + i, *parameter.shape) * 0.3)
    return layer


def same_gradients(layer: ParallelLinear, whole: nn.Module) -> None:
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    assert gradients.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        expected = gradients[name]
        if expected is not None and name in layer.shards:
            expected = layer.shards[name].take(expected)
        close(parameter.grad, expected, name)


def inputs() -> Iterator[Tensor]:
    """Of all ranks, and in the ways that views lie in memory."""
    yield values(1, 5, IN)
    yield values(2, IN)
    yield values(4, 3, 2, IN).transpose(0, 1)
    yield values(5, 2, 3, 2 * IN)[..., ::2]
    yield values(6, IN).expand(3, IN)
    yield values(7, 0, IN)


# -- the numbers of the whole layer ------------------------------------------------------------------------------


def equals_the_whole(kind: str, bias: bool) -> None:
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
        g = values(50 + i, *y.shape) if i % 2 else torch.ones((), dtype=torch.float64).expand_as(y)
        expected.backward(g)
        version = x._version
        y.backward(g)
        assert x._version == version
        close(x.grad, whole_x.grad)
    same_gradients(column, first)  # accumulated over the inputs
    same_gradients(row, second)
    assert contiguous and all(contiguous)

    whole = linear(1, HIDDEN, OUT, bias, kind)
    alone: list[ParallelLinear] = [
        ColumnParallelLinear.from_linear(whole, group=world(), gather_output=True),
        RowParallelLinear.from_linear(whole, group=world(), input_is_parallel=False),
    ]
    for layer in alone:
        whole.zero_grad()
        x, whole_x = values(1, 5, HIDDEN).requires_grad_(), values(1, 5, HIDDEN).requires_grad_()
        y, expected = layer(x), whole(whole_x)
        close(y, expected)
        y.backward(values(2, *y.shape))
        expected.backward(values(2, *y.shape))
        close(x.grad, whole_x.grad)
        same_gradients(layer, whole)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("kind", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
def test_pairs_and_layers_alone_equal_the_whole_in_output_and_every_gradient(
    pool: WorkerPool, kind: str, bias: bool, world_size: int
) -> None:
    pool.run(equals_the_whole, world_size, kind, bias)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_one_rank_computes_exactly_the_whole_layer(kind: str) -> None:
    whole, region, x = linear(1, IN, OUT, kind=kind), mock.Mock(), values(1, 5, IN).requires_grad_()
    options: dict[str, Any] = {"group": ranks(1), "site": Site(ranks(1), region)}
    layers: list[ParallelLinear] = [
        ColumnParallelLinear.from_linear(whole, **options),
        ColumnParallelLinear.from_linear(whole, gather_output=True, **options),
        RowParallelLinear.from_linear(whole, **options),
        RowParallelLinear.from_linear(whole, input_is_parallel=False, **options),
    ]
    for layer in layers:
        assert torch.equal(layer(x), whole(x))
    assert not region.mock_calls


def frozen() -> None:
    for names in (["weight"], ["bias"], ["weight", "bias"]):
        first, second = linear(1, IN, HIDDEN), linear(2, HIDDEN, OUT)
        for whole in (first, second):
            for name in names:
                getattr(whole, name).requires_grad_(False)
        column = ColumnParallelLinear.from_linear(first, group=world())
        row = RowParallelLinear.from_linear(second, group=world())
        x, whole_x = values(1, 5, IN).requires_grad_(), values(1, 5, IN).requires_grad_()
        hidden = column(x)
        assert (hidden.grad_fn.saved_tensors[0] is None) == ("weight" in names)
        row(torch.tanh(hidden)).square().sum().backward()
        second(torch.tanh(first(whole_x))).square().sum().backward()
        close(x.grad, whole_x.grad)
        for layer, whole in ((column, first), (row, second)):
            assert all(p.requires_grad == (name not in names) for name, p in layer.named_parameters())
            same_gradients(layer, whole)


def test_frozen_weights_get_no_gradient_keep_no_input_and_let_the_inputs_gradient_through(pool: WorkerPool) -> None:
    pool.run(frozen, 2)


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


def test_a_second_derivative_is_refused(pool: WorkerPool) -> None:
    pool.run(second_derivatives, 2)


@pytest.mark.parametrize("function", [
    lambda x: copy_linear(x, torch.ones(5, 4), torch.ones(5), ranks(1)),
    lambda x: functions.gather(x.to("meta"), -1, ranks(2)),
])  # fmt: skip
def test_outputs_may_be_changed_in_place(function: Any) -> None:
    assert function(torch.ones(2, 3, 4, requires_grad=True)).relu_().requires_grad


def test_a_copy_that_shares_memory_may_not_be_changed_in_place() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="in-?place"):  # else the gradients of other uses of x would be wrong
        functions.copy(x, ranks(2)).relu_()


# -- messages ----------------------------------------------------------------------------------------------------


def layers_and_inputs() -> dict[str, tuple[ParallelLinear, int]]:
    """Layers in all ways, and how many features they take here."""
    pieces: dict[str, Any] = {"group": world(), "site": Site(world(), in_block=True)}
    return {
        "column": (ColumnParallelLinear(4, 6, group=world()), 4),
        "column, gathered": (ColumnParallelLinear(4, 6, group=world(), gather_output=True), 4),
        "column, in a block on pieces": (ColumnParallelLinear.from_linear(nn.Linear(4, 6), **pieces), 4),
        "row": (RowParallelLinear(8, 6, group=world()), 4),
        "row, splits": (RowParallelLinear(8, 6, group=world(), input_is_parallel=False), 8),
        "row, in a block on pieces": (RowParallelLinear.from_linear(nn.Linear(8, 6), **pieces), 4),
    }


def messages() -> dict[str, list[list[str]]]:
    found = {}
    for name, (layer, size) in layers_and_inputs().items():
        for wanted in (True, False):
            with Messages() as forward:
                y = layer(torch.ones(1, 2, size, requires_grad=wanted))
            with Messages() as backward:
                y.sum().backward()
            found[name if wanted else f"{name}, data"] = [[n for n, _ in each.sent] for each in (forward, backward)]
    return found


def test_a_layer_sends_one_message_in_the_direction_that_needs_it(pool: WorkerPool) -> None:
    reduced, joined, scattered = ["allreduce_"], ["allgather_"], ["reduce_scatter_"]
    assert pool.run(messages, 2)[0] == {
        "column": [[], reduced],
        "column, data": [[], []],
        "column, gathered": [joined, reduced],
        "column, gathered, data": [joined, []],
        "column, in a block on pieces": [[], []],
        "column, in a block on pieces, data": [[], []],
        "row": [reduced, []],
        "row, data": [reduced, []],
        "row, splits": [reduced, joined],
        "row, splits, data": [reduced, []],
        "row, in a block on pieces": [scattered, joined],
        "row, in a block on pieces, data": [scattered, joined],
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


def without_memory() -> None:
    for layer, size in layers_and_inputs().values():
        like = torch.empty(2, 4, size)
        shape = layer(like).shape
        absent = [absent_like(like, "elsewhere"), absent_like(like, "elsewhere").requires_grad_()]
        for x in [*absent, torch.empty_like(like, device="meta", requires_grad=True)]:
            module = layer if isinstance(x, AbsentTensor) else copy.deepcopy(layer).to("meta")
            with Messages() as sent:
                y = module(x)
                torch.autograd.backward(y, torch.empty_like(y))
            assert y.shape == shape and y.device == x.device and y.dtype == x.dtype
            assert not x.requires_grad or x.grad is not None and x.grad.shape == x.shape
            assert not sent.sent
        for parameter in ("weight", "bias"):  # the layer is elsewhere, its input is here
            setattr(layer, parameter, nn.Parameter(absent_like(getattr(layer, parameter).detach(), "elsewhere")))
        with Messages() as sent:
            y = layer(like)
        assert isinstance(y, AbsentTensor) and y.shape == shape and not sent.sent


def test_tensors_without_memory_get_their_shapes_and_send_nothing(pool: WorkerPool) -> None:
    pool.run(without_memory, 2)


def region_borders() -> None:
    region = mock.Mock()
    options: dict[str, Any] = {"group": world(), "site": Site(world(), region)}

    def calls(layer: nn.Module) -> list[str]:
        region.reset_mock()
        layer(torch.ones(2, 4))
        return [name for name, *_ in region.mock_calls]

    assert calls(ColumnParallelLinear.from_linear(nn.Linear(4, 6), **options)) == ["enter"]
    assert calls(ColumnParallelLinear.from_linear(nn.Linear(4, 6).eval(), **options)) == []
    assert calls(ColumnParallelLinear.from_linear(nn.Linear(4, 6), gather_output=True, **options)) == []
    assert calls(RowParallelLinear.from_linear(nn.Linear(8, 6), **options)) == ["leave"]


def test_a_region_is_entered_after_columns_in_training_and_left_before_rows(pool: WorkerPool) -> None:
    pool.run(region_borders, 2)


# -- parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_first_weights_and_names_are_those_of_the_whole_layer(count: int, bias: bool, device: str) -> None:
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(3)
            whole = nn.Linear(HIDDEN, HIDDEN, bias, device, dtype)
            after = torch.get_rng_state()
            for rank in range(count):
                torch.manual_seed(3)
                layer = kind(HIDDEN, HIDDEN, bias, group=ranks(count, rank), dtype=dtype, device=device)
                assert torch.equal(torch.get_rng_state(), after)
                assert list(layer.state_dict()) == list(whole.state_dict())
                for name, parameter in whole.named_parameters():
                    part = layer.shards[name].take(parameter) if name in layer.shards else parameter
                    assert torch.equal(getattr(layer, name), part)


def test_a_layer_made_from_another_keeps_orientation_dtype_mode_and_what_trains() -> None:
    for whole in (nn.Linear(4, 6, dtype=torch.bfloat16), Conv1D(6, 4).bfloat16()):
        whole.eval()
        whole.bias.requires_grad_(False)
        before = {name: value.clone() for name, value in whole.state_dict().items()}
        for kind, dim in zip(KINDS, (0, 1), strict=True):
            layer = kind.from_linear(whole, group=ranks(2, 1))
            assert (layer.in_features, layer.out_features, layer.training) == (4, 6, False)
            assert layer.weight.dtype == torch.bfloat16
            assert layer.weight.requires_grad and layer.bias is not None and not layer.bias.requires_grad
            assert layer.shards["weight"].dim == (dim if isinstance(whole, nn.Linear) else 1 - dim)
            assert layer.shards["weight"].shape == whole.weight.shape
            assert torch.equal(layer.weight, layer.shards["weight"].take(whole.weight))
        assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())


def copies() -> None:
    region = ShardedRegion(0, torch.device("cpu"))
    for kind, size in zip(KINDS, (4, 8), strict=True):
        layer = kind.from_linear(nn.Linear(size, 6), group=world(), site=Site(world(), region))
        twin = copy.deepcopy(layer)
        assert type(twin) is type(layer) and twin.group is layer.group and twin.shards == layer.shards
        assert twin.site.region is region and twin.weight is not layer.weight
        assert torch.equal(twin(torch.ones(2, 4)), layer(torch.ones(2, 4)))
        with torch.no_grad():
            twin.weight.zero_()
        assert layer.weight.any()
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(layer)


def test_a_copy_shares_the_group_and_no_parameter_and_pickling_says_what_to_do_instead(pool: WorkerPool) -> None:
    pool.run(copies, 2)


# -- refusals ----------------------------------------------------------------------------------------------------


class Clamped(nn.Linear):
    """Computes the same for small values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1e3, 1e3)


def plain(change: Callable[[nn.Linear], object]) -> nn.Module:
    layer = nn.Linear(4, 4)
    change(layer)
    return layer


HOOKS = (
    "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_post_hook",
    "state_dict_pre_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook",
)  # fmt: skip
REFUSED: list[tuple[str, nn.Module]] = [
    *(("hooks", plain(lambda x, hook=hook: getattr(x, f"register_{hook}")(lambda *_, **__: None))) for hook in HOOKS),  # type: ignore[misc]
    ("hooks", nn.LazyLinear(4)),
    ("parametrization", parametrizations.weight_norm(nn.Linear(4, 4))),
    ("MultiheadAttention", nn.MultiheadAttention(4, 2).out_proj),
    ("not nn.Linear", nn.Embedding(4, 4)),
    ("not nn.Linear", nn.Conv1d(4, 4, 1)),
    ("forward of its own", Clamped(4, 4)),
    ("forward replaced", plain(lambda layer: setattr(layer, "forward", torch.relu))),
    (r"\(scale\)", plain(lambda layer: layer.register_parameter("scale", nn.Parameter(torch.ones(4))))),
]


@pytest.mark.parametrize(("problem", "layer"), REFUSED)
def test_a_layer_that_is_more_than_linear_is_refused_by_name(problem: str, layer: nn.Module) -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match=f"{type(layer).__name__} .*{problem}"):
            kind.from_linear(layer, group=ranks(2))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_the_old_weight_norm_is_refused_and_a_subclass_that_computes_the_same_is_taken() -> None:
    with pytest.raises(ValueError, match="weight_norm"):
        ColumnParallelLinear.from_linear(weight_norm(nn.Linear(4, 4)), group=ranks(2))
    subclass = type("Plain", (nn.Linear,), {})
    assert ColumnParallelLinear.from_linear(subclass(4, 4), group=ranks(2)).weight.shape == (2, 4)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ColumnParallelLinear(3, 5, group=ranks(4)), "5 can't be divided over 4 tensor ranks"),
    (lambda: RowParallelLinear(5, 3, group=ranks(4)), "5 can't be divided over 4 tensor ranks"),
    (lambda: ColumnParallelLinear(3, 9, group=ranks(2), parts=(4, 4)), r"\(4, 4\) add up to 8"),
    (lambda: ColumnParallelLinear(3, 8, group=ranks(2), parts=(4, 4), gather_output=True), "gather_output=True"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
