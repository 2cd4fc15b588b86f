"""Tensors without values: right in shape, dtype and device, free of memory, and never mistaken for a value."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_parallel.absent.module import make_absent
from lightning_parallel.absent.tensor import AbsentTensor, AbsentValueError, absent_like, first_absent

CPU = torch.device("cpu")


@pytest.fixture
def process_of_its_own() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def absent() -> AbsentTensor:
    return absent_like(torch.randn(3, 4), "the output of 'far'")


def made_absent(module: nn.Module) -> nn.Module:
    make_absent(module, "", CPU)
    return module


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_it_holds_no_memory() -> None:
    huge = absent_like(torch.empty(2**40, device="meta"), "x", CPU)  # 4 TB
    assert huge.device == CPU
    result = (huge * 2).view(2**20, 2**20) @ huge.view(2**20, 2**20)
    assert result.shape == (2**20, 2**20)
    with pytest.raises(AbsentValueError):
        result.data_ptr()
    huge.add_(1).zero_()


def test_sequences_are_padded_only_with_lengths() -> None:
    """What a layer of another stage returns for packed sequences has none."""
    sizes = absent_like(torch.tensor([2, 1]), "the output of 'rnn'", CPU)
    packed = nn.utils.rnn.PackedSequence(absent_like(torch.randn(3, 4), "the output of 'rnn'", CPU), sizes)
    with pytest.raises(AbsentValueError, match=r"lengths, which are in the output of 'rnn'.* inside one module"):
        nn.utils.rnn.pad_packed_sequence(packed)


def test_it_is_never_saved(tmp_path: Path) -> None:
    """A script's torch.save(model.state_dict()) would end without an error, and without the weights."""
    absent = absent_like(torch.empty(2), "parameter 'a.weight'", CPU)
    with pytest.raises(RuntimeError, match=r"(?s)a\.weight.*trainer\.save_checkpoint"):
        torch.save({"a.weight": absent}, tmp_path / "weights.pt")


@pytest.mark.parametrize("operation", [
    lambda x: x.softmax(-1).max(dim=-1),
    lambda x: nn.functional.cross_entropy(x, torch.tensor([0, 1, 2])),
    lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: x.unbind(),
])  # fmt: skip
def test_what_depends_on_it_is_absent_with_the_right_shape(operation: Callable[[Tensor], Any]) -> None:
    expected = pytree.tree_leaves(operation(torch.randn(3, 4)))
    found = pytree.tree_leaves(operation(absent_like(torch.randn(3, 4), "somewhere")))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, AbsentTensor) and one.origin == "somewhere"
        assert one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def test_equal_numbers_of_other_types_give_other_dtypes() -> None:
    """What an operation gives is remembered."""
    whole = absent_like(torch.arange(3), "x")
    assert [(whole * factor).dtype for factor in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


@pytest.mark.parametrize(("operation", "expected"), [
    (lambda x: torch.zeros_like(x), torch.zeros(3, 4)),
    (lambda x: torch.full_like(x, 2.5), torch.full((3, 4), 2.5)),
    (lambda x: x.new_ones((2, 1), dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64)),
    (lambda x: torch.arange(x.size(1), device=x.device), torch.arange(4)),
    (lambda x: torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype).tril(), torch.ones(4, 4).tril()),
    (lambda x: torch.finfo(x.dtype).min * torch.zeros_like(x).add_(1), torch.full((3, 4), -3.4028234663852886e38)),
])  # fmt: skip
def test_what_depends_on_its_shape_alone_has_values(
    absent: AbsentTensor, operation: Callable[[Tensor], Tensor], expected: Tensor
) -> None:
    found = operation(absent)
    assert type(found) is Tensor and found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(
    "change", [lambda x: x.t_(), lambda x: x.unsqueeze_(1), lambda x: x[:1].squeeze_(0), lambda x: x.transpose_(0, 1)]
)
def test_a_change_of_shape_in_place_is_seen(change: Callable[[Tensor], Tensor]) -> None:
    expected, found = torch.zeros(3, 4), absent_like(torch.zeros(3, 4), "x")
    one, other = change(expected), change(found)
    assert one.shape == other.shape and one.is_contiguous() == other.is_contiguous()
    assert found.shape == (found + 1).shape == expected.shape


@pytest.mark.parametrize("write", [
    lambda real, x: real.add_(x),
    lambda real, x: real.__setitem__(x > 0, 1.0),
    lambda real, x: torch.add(x, 1, out=real),
    lambda real, x: torch._foreach_add_([real], [x]),
])  # fmt: skip
def test_a_write_into_a_real_tensor_is_refused(absent: AbsentTensor, write: Callable[[Tensor, Tensor], Any]) -> None:
    real = torch.ones(3, 4)
    with pytest.raises(AbsentValueError, match=r"writes the output of 'far'.*another pipeline stage"):
        write(real, absent)
    assert torch.equal(real, torch.ones(3, 4))


@pytest.mark.parametrize("question", [
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: f"{x.sum():.3f}",
    lambda x: x[x > 0],
    lambda x: torch.equal(x, x + 1),
])  # fmt: skip
def test_a_question_for_its_values_is_refused_naming_the_origin(
    absent: AbsentTensor, question: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(AbsentValueError, match=r"the output of 'far', which lives on another pipeline stage"):
        question(absent)


@pytest.mark.parametrize("index", [
    lambda rows, cells: rows,
    lambda rows, cells: cells,
    lambda rows, cells: (slice(1, None), ~cells[0]),
    lambda rows, cells: (rows, torch.tensor([3, 0])),
    lambda rows, cells: (None, rows, ..., torch.tensor([1])),
])  # fmt: skip
def test_a_mask_with_values_says_how_many_there_are(absent: AbsentTensor, index: Callable[..., Any]) -> None:
    where = index(torch.tensor([True, False, True]), torch.eye(3, 4, dtype=torch.bool))
    assert absent[where].shape == torch.ones(absent.shape)[where].shape


@pytest.mark.parametrize("draw", [
    lambda x: nn.functional.dropout(x),
    lambda x: nn.functional.dropout(x, training=False),
    lambda x: torch.bernoulli(x.sigmoid()),
    lambda x: x.clone().uniform_(),
    lambda x: torch.normal(x, 1.0),
    lambda x: torch.multinomial(x.softmax(-1), 2),
    lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: x + torch.randn(x.shape),
])  # fmt: skip
def test_as_much_is_drawn_for_it_as_for_a_tensor_with_values(
    absent: AbsentTensor, draw: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    draw(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    assert isinstance(draw(absent), AbsentTensor)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_noise_in_its_shape_has_values(absent: AbsentTensor) -> None:
    for like, plain in ((torch.randn_like, torch.randn), (torch.rand_like, torch.rand)):
        torch.manual_seed(0)
        noise = like(absent)
        torch.manual_seed(0)
        assert not isinstance(noise, AbsentTensor) and torch.equal(noise, plain(3, 4))


# -- modules -----------------------------------------------------------------------------------------------------------


def test_what_a_module_held_is_freed() -> None:
    module = nn.ModuleList(
        [nn.Linear(3, 2), nn.GRU(3, 2, num_layers=2), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(2)]
    )
    held = [weakref.ref(tensor) for tensor in (*module.parameters(), *module.buffers())]
    made_absent(module)
    assert [ref for ref in held if ref() is not None] == []


def test_modules_move_and_change_dtype() -> None:
    module = made_absent(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.GRU(2, 2)))
    for change, dtype in ((module.double, torch.float64), (module.half, torch.float16)):
        change()
        assert all(p.dtype == dtype and isinstance(p, AbsentTensor) for p in module.parameters())
        assert all(isinstance(p, nn.Parameter) for p in module.parameters())
        output, _ = module(torch.ones(4, 3, dtype=dtype))
        assert output.dtype == dtype and output.shape == (4, 2)
    module.to("meta")
    assert all(p.device.type == "meta" for p in module.parameters())


# -- memory that tensors share -----------------------------------------------------------------------------------


def test_a_write_to_a_view_is_one_to_what_it_is_a_view_of() -> None:
    whole, other = absent_like(torch.zeros(4, 2), "the whole"), absent_like(torch.zeros(2), "another")
    whole[1:].t()[:, 0].add_(other)
    assert whole.origins == {"the whole", "another"}
    copied = whole.clone()
    copied.mul_(absent_like(torch.zeros(2), "a third"))
    assert whole.origins == {"the whole", "another"} and "a third" in copied.origins


@pytest.mark.parametrize("change", [
    lambda p, q: setattr(p, "data", p.data * 0.9 + q.data * 0.1),
    lambda p, q: p.data.mul_(0.9).add_(q.data, alpha=0.1),
    lambda p, q: p.detach().copy_(q),
    lambda p, q: torch._foreach_lerp_([p], [q], 0.1),
], ids=["data set", "data", "detached", "foreach"])  # fmt: skip
def test_a_parameter_updated_from_another_has_its_origin_too(change: Any) -> None:
    p, q = (absent_like(nn.Parameter(torch.zeros(2)), name) for name in ("p", "q"))
    with torch.no_grad():
        change(p, q)
    assert p.origins == {"p", "q"} and q.origins == {"q"} and isinstance(p, nn.Parameter)


def test_operations_on_lists_are_done_where_values_are() -> None:
    here, there = torch.ones(2), absent_like(torch.ones(2), "far")
    values = [here, there, here.clone()]
    torch._foreach_mul_(values, [torch.full((2,), 3.0)] * 3)
    assert torch.equal(here, torch.full((2,), 3.0)) and there.origins == {"far"}
    assert [type(x) is AbsentTensor for x in torch._foreach_norm(values)] == [False, True, False]
    with pytest.raises(AbsentValueError):
        torch._foreach_add_([here, here.clone()], [there, here])


# -- collectives -------------------------------------------------------------------------------------------------------


def test_a_collective_meets_nobody_keeps_the_origins_and_leaves_no_zero_where_a_value_is_absent(
    process_of_its_own: None, absent: AbsentTensor
) -> None:
    other = absent_like(absent, "the output of 'near'")
    dist.all_gather([other], absent)
    assert other.origins == {"the output of 'far'", "the output of 'near'"}
    dist.all_reduce(absent)
    assert first_absent(absent) is absent
    present = torch.zeros(3, 4)
    for gather, into in ((dist.all_gather, [present]), (dist.all_gather_into_tensor, present)):
        with pytest.raises(AbsentValueError, match="far"):
            gather(into, absent)  # type: ignore[operator]
