"""Tensors without values: right in shape, dtype and device, free of memory, and never mistaken for a value."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from lightning_parallel.pipeline.absent import (
    ANSWERS_KEPT,
    AbsentForward,
    AbsentTensor,
    AbsentValueError,
    absent_like,
    first_absent,
    make_absent,
)

CPU = torch.device("cpu")


@pytest.fixture
def absent() -> AbsentTensor:
    return absent_like(torch.randn(3, 4), "the output of 'far'")


def made_absent(module: nn.Module) -> nn.Module:
    make_absent(module, lambda name: f"parameter '{name}'", CPU)
    return module


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_it_looks_like_the_tensor_but_for_the_values(absent: AbsentTensor) -> None:
    like = torch.empty(2, 3, 5, dtype=torch.bfloat16).transpose(0, 2)
    found = absent_like(like, "x")
    assert found.shape == like.shape and found.stride() == like.stride()
    assert found.dtype == like.dtype and found.device == like.device and not found.requires_grad
    assert isinstance(found, Tensor) and not isinstance(found, nn.Parameter)
    assert "the output of 'far'" in repr(absent)


def test_it_holds_no_memory() -> None:
    huge = absent_like(torch.empty(2**40, device="meta"), "x", CPU)  # 4 TB
    assert huge.device == CPU and huge.data_ptr() == 0
    result = (huge * 2).view(2**20, 2**20) @ huge.view(2**20, 2**20)
    assert result.shape == (2**20, 2**20) and result.data_ptr() == 0
    huge.add_(1).zero_()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: torch.ones(3, 1) * x,
        lambda x: x.transpose(0, 1).reshape(2, 6)[:, 1:],
        lambda x: torch.cat([torch.ones(2, 4), x]),
        lambda x: torch.stack([x, x], dim=1).sum((0, 1)),
        lambda x: x.softmax(-1).max(dim=-1),
        lambda x: torch.where(torch.ones(3, 4) > 0, x, 0),
        lambda x: x.double().long(),
        lambda x: nn.functional.layer_norm(x, (4,)),
        lambda x: nn.functional.cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: torch.einsum("ij,kj->ik", x, torch.ones(5, 4)),
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: x.chunk(2, dim=-1),
        lambda x: x @ nn.Parameter(torch.ones(4, 2)),
        lambda x: torch.rand_like(x),  # its values would have to be equal on all stages
        lambda x: x.unbind(),
    ],
)
def test_what_depends_on_it_is_absent_with_the_right_shape(operation: Callable[[Tensor], Any]) -> None:
    expected = pytree.tree_leaves(operation(torch.randn(3, 4)))
    found = pytree.tree_leaves(operation(absent_like(torch.randn(3, 4), "somewhere")))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, AbsentTensor) and one.origin == "somewhere"
        assert one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def test_origins_gather(absent: AbsentTensor) -> None:
    other = absent_like(torch.ones(3, 4), "another")
    assert (absent + other * 2).origins == {"the output of 'far'", "another"}
    assert (absent + 1).origins == {"the output of 'far'"}
    changed = absent + 0
    changed.add_(other)
    assert changed.origins == {"the output of 'far'", "another"}


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: torch.zeros_like(x), torch.zeros(3, 4)),
        (lambda x: torch.ones_like(x, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)),
        (lambda x: torch.full_like(x, 2.5), torch.full((3, 4), 2.5)),
        (lambda x: x.new_zeros(2), torch.zeros(2)),
        (lambda x: x.new_ones((2, 1), dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64)),
        (lambda x: x.new_full((2,), 7), torch.full((2,), 7.0)),
        (lambda x: torch.arange(x.size(1), device=x.device), torch.arange(4)),
        (lambda x: torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype).tril(), torch.ones(4, 4).tril()),
        (lambda x: torch.finfo(x.dtype).min * torch.zeros_like(x).add_(1), torch.full((3, 4), -3.4028234663852886e38)),
    ],
)
def test_what_depends_on_its_shape_alone_has_values(
    absent: AbsentTensor, operation: Callable[[Tensor], Tensor], expected: Tensor
) -> None:
    found = operation(absent)
    assert type(found) is Tensor and found.dtype == expected.dtype and torch.equal(found, expected)


def test_what_is_made_like_a_parameter_stays_absent() -> None:
    layer = made_absent(nn.Linear(3, 2))
    optimizer = torch.optim.Adagrad(layer.parameters())  # makes its state in its constructor
    assert all(isinstance(state["sum"], AbsentTensor) for state in optimizer.state.values())


def test_a_change_in_place_stays_the_same_object(absent: AbsentTensor) -> None:
    result = absent.mul_(2)
    assert result is absent
    absent += 1
    absent[0] = 5
    absent[:, 1].fill_(0)
    nn.functional.relu(absent, inplace=True)
    assert isinstance(absent, AbsentTensor) and absent.shape == (3, 4)


@pytest.mark.parametrize(
    "change", [lambda x: x.t_(), lambda x: x.unsqueeze_(1), lambda x: x[:1].squeeze_(0), lambda x: x.transpose_(0, 1)]
)
def test_a_change_of_shape_in_place_is_seen(change: Callable[[Tensor], Tensor]) -> None:
    expected, found = torch.zeros(3, 4), absent_like(torch.zeros(3, 4), "x")
    result = change(found)
    assert (
        result.shape == change(expected).shape and result.is_contiguous() == change(torch.zeros(3, 4)).is_contiguous()
    )
    assert found.shape == expected.shape
    assert (found + 1).shape == expected.shape


@pytest.mark.parametrize(
    "write",
    [
        lambda real, x: real.add_(x),
        lambda real, x: real.copy_(x),
        lambda real, x: real.__setitem__(0, x[0]),
        lambda real, x: real.__setitem__(x > 0, 1.0),
        lambda real, x: real.masked_fill_(x > 0, 0),
        lambda real, x: real[0].mul_(x[0]),
        lambda real, x: torch.add(x, 1, out=real),
        lambda real, x: torch.mm(x, x.t(), out=torch.empty(3, 3)),
        lambda real, x: torch._foreach_add_([real], [x]),
        lambda real, x: real.scatter_(0, x.long(), 1.0),
    ],
)
def test_a_write_into_a_real_tensor_is_refused(absent: AbsentTensor, write: Callable[[Tensor, Tensor], Any]) -> None:
    real = torch.ones(3, 4)
    with pytest.raises(AbsentValueError, match=r"writes the output of 'far'.*another pipeline stage"):
        write(real, absent)
    assert torch.equal(real, torch.ones(3, 4))


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: float(x.sum()),
        lambda x: int(x.sum()),
        lambda x: 1 if x.isnan().any() else 0,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.detach().cpu().numpy(),
        lambda x: f"{x.sum():.3f}",
        lambda x: x.nonzero(),
        lambda x: torch.ones(3, 4)[x > 0],
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x + 1),
        lambda x: torch.allclose(x, torch.ones(3, 4)),
        lambda x: [0, 1, 2][x[0, 0].long()],
        lambda x: x.unique(),
    ],
)
def test_a_question_for_its_values_is_refused_naming_the_origin(
    absent: AbsentTensor, question: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(AbsentValueError, match=r"the output of 'far', which lives on another pipeline stage"):
        question(absent)


def test_a_wrong_shape_is_told_as_such(absent: AbsentTensor) -> None:
    with pytest.raises(AbsentValueError, match=r"\[3, 4\] X \[3, 4\]"):
        absent @ absent


def test_first_absent_looks_into_structures(absent: AbsentTensor) -> None:
    assert first_absent({"a": [torch.ones(1), (absent,)]}) is absent
    assert first_absent({"a": [torch.ones(1), "text"]}) is None


def test_nothing_is_drawn_from_the_random_number_generator(absent: AbsentTensor) -> None:
    gru = made_absent(nn.GRU(4, 4, num_layers=2, dropout=0.5))
    before = torch.get_rng_state()
    nn.functional.dropout(absent)
    torch.bernoulli(absent.sigmoid())
    absent.uniform_()
    nn.init.kaiming_uniform_(absent)
    gru(absent)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_on_dtypes_as_ever(absent: AbsentTensor, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        assert (absent @ absent.t()).dtype == dtype
        assert nn.functional.linear(absent, torch.ones(2, 4)).dtype == dtype
        assert nn.functional.mse_loss(absent.to(dtype), absent.to(dtype)).dtype == torch.float32
    assert (absent @ absent.t()).dtype == torch.float32


# -- modules -----------------------------------------------------------------------------------------------------------


def test_parameters_stay_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    before = {name: (p.shape, p.requires_grad) for name, p in module.named_parameters()}
    buffers = {name: (b.shape, b.dtype) for name, b in module.named_buffers()}
    made_absent(module)
    assert {name: (p.shape, p.requires_grad) for name, p in module.named_parameters()} == before
    assert {name: (b.shape, b.dtype) for name, b in module.named_buffers()} == buffers
    for parameter in module.parameters():
        assert isinstance(parameter, AbsentTensor) and isinstance(parameter, nn.Parameter) and parameter.is_leaf
    assert all(isinstance(b, AbsentTensor) and not isinstance(b, nn.Parameter) for b in module.buffers())
    assert module[0].weight.origin == "parameter '0.weight'"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers_take_them_and_leave_them_alone(kind: type[torch.optim.Optimizer]) -> None:
    absent, real = made_absent(nn.Linear(3, 2)), nn.Linear(2, 1)
    optimizer = kind([*absent.parameters(), *real.parameters()], lr=0.1)  # type: ignore[call-arg]
    before = real.weight.detach().clone()
    real(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(real.weight, before)
    assert nn.utils.clip_grad_norm_(absent.parameters(), 1.0) == 0


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


def test_modules_are_copied() -> None:
    module = made_absent(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    module[0].bias.requires_grad_(False)
    twin = copy.deepcopy(module)
    for (name, one), (_, other) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert isinstance(other, AbsentTensor) and isinstance(other, nn.Parameter) and one is not other
        assert other.requires_grad == one.requires_grad and other.origins == one.origins, name
    both = copy.deepcopy([module[0].weight, module[0].weight])
    assert both[0] is both[1]


def test_loading_a_state_dict_changes_nothing_and_fails_on_nothing() -> None:
    module = made_absent(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    module.load_state_dict(state)
    assert all(isinstance(value, AbsentTensor) for value in module.state_dict().values())


class Pair(nn.Module):
    """A dict of tuples, an int among them; something changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        y = self.layer(x)
        y[:, 0].zero_()
        return {"pair": (y * scale, y.sum(-1)), "count": 3, "none": None}


def gpt2_block() -> nn.Module:
    return GPT2Block(GPT2Config(n_embd=8, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0), layer_idx=0)


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
        self.rotary = LlamaRotaryEmbedding(config)
        self.layer = LlamaDecoderLayer(config, layer_idx=0)

    def forward(self, x: Tensor) -> Any:
        positions = torch.arange(x.shape[1])[None]
        return self.layer(x, position_ids=positions, position_embeddings=self.rotary(x, positions))


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=batch_first)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, attn_mask=torch.zeros(x.shape[1], x.shape[1]) if x.shape[0] > 3 else None)


TWINS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 3), (4, 5, 8)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 8)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2), (2, 3, 9, 9)),
    "conv transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
    "batchnorm": (lambda: nn.BatchNorm1d(8), (4, 8)),
    "batchnorm2d": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "groupnorm": (lambda: nn.GroupNorm(2, 8), (4, 8, 3)),
    "layernorm": (lambda: nn.LayerNorm(8), (4, 8)),
    "rmsnorm": (lambda: nn.RMSNorm(8), (4, 8)),
    "lstm": (lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, dropout=0.1), (5, 4, 8)),
    "gru": (lambda: nn.GRU(8, 6, batch_first=True), (5, 4, 8)),
    "attention": (lambda: Attention(batch_first=True), (3, 4, 8)),
    "attention, mask": (lambda: Attention(batch_first=True), (5, 4, 8)),
    "attention, sequence first": (lambda: Attention(batch_first=False), (4, 4, 8)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 4, 8)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (3, 4, 8)),
    "gpt2": (gpt2_block, (3, 4, 8)),
    "llama": (LlamaLayer, (3, 4, 8)),
    "pair": (Pair, (3, 8)),
    "pooling": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)), (2, 3, 5, 5)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), (2, 8)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), (2, 8)),
}


@pytest.mark.parametrize("mode", ["train", "eval", "autocast"])
@pytest.mark.parametrize("name", TWINS)
def test_an_absent_module_answers_in_the_structure_of_the_real_one(name: str, mode: str) -> None:
    make, shape = TWINS[name]
    module = make().train(mode != "eval")
    x = torch.randn(shape)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"),
        torch.set_grad_enabled(mode != "eval"),
    ):
        expected, structure = pytree.tree_flatten(copy.deepcopy(module)(x))
        forward = AbsentForward(made_absent(module), "far")
        answers = [forward(x), forward(x), forward(absent_like(x, "before"))]
    for answer in answers:
        found, found_structure = pytree.tree_flatten(answer)
        assert str(found_structure) == str(structure)
        for one, other in zip(found, expected, strict=True):
            if isinstance(other, Tensor):
                assert isinstance(one, AbsentTensor) and one.origins == {"the output of 'far'"}
                assert one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
            else:
                assert one == other


@pytest.mark.parametrize(("name", "index"), [("embedding", 0), ("bag", 1)])
def test_an_absent_embedding_answers_to_token_ids(name: str, index: int) -> None:
    module = [nn.Embedding(10, 8), nn.EmbeddingBag(10, 8)][index]
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = module(ids)
    answer = AbsentForward(made_absent(module), name)(ids)
    assert answer.shape == expected.shape and answer.dtype == expected.dtype


class Counting(nn.Linear):
    """Counts how often its forward runs."""

    calls = 0

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        self.calls += 1
        result = super().forward(x)
        return (result, result) if self.training else result


class Colour(Enum):
    RED = 1
    BLUE = 2


def test_the_module_is_asked_once_for_each_kind_of_input() -> None:
    module = made_absent(Counting(4, 2))
    assert isinstance(module, Counting)
    forward = AbsentForward(module, "far")
    x = torch.ones(3, 4)
    kinds: list[Callable[[], Any]] = [
        lambda: forward(x),
        lambda: forward(torch.ones(2, 4)),
        lambda: forward(x, 1),
        lambda: forward(x, True),  # equal to 1, and not the same
        lambda: forward(x, key=1),
        lambda: forward(x, torch.float16),
        lambda: forward(x, torch.bfloat16),
        lambda: forward(x, Colour.RED),
        lambda: forward(x, Colour.BLUE),
        lambda: forward(x, torch.ones(1)),
        lambda: forward(x, [torch.ones(1)]),
        lambda: forward(x, torch.ones(1, dtype=torch.int64)),
    ]
    for _ in range(3):
        for kind in kinds:
            kind()
    assert module.calls == len(kinds)


def test_answers_are_kept_for_the_inputs_that_came_last() -> None:
    """A step that hands a layer a number that counts up must not fill the memory."""
    module = made_absent(Counting(4, 2))
    forward = AbsentForward(module, "far")
    x = torch.ones(3, 4)
    for number in range(3 * ANSWERS_KEPT):
        forward(x)
        forward(x, number)
    assert module.calls == 1 + 3 * ANSWERS_KEPT  # what comes again and again is asked once
    forward(x, 0)
    assert module.calls == 2 + 3 * ANSWERS_KEPT  # what came long ago was forgotten


def test_the_answer_follows_autocast_and_the_mode() -> None:
    module = made_absent(Counting(4, 2))
    forward = AbsentForward(module, "far")
    x = torch.ones(3, 4)
    dtypes = []
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            dtypes.append(forward(x)[0].dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    module.eval()
    assert isinstance(forward(x), Tensor)
    module.train()
    assert isinstance(forward(x), tuple)


def test_an_answer_changed_in_place_does_not_reach_the_next() -> None:
    forward = AbsentForward(made_absent(nn.Linear(4, 2)), "far")
    x = torch.ones(3, 4)
    forward(x).add_(absent_like(torch.ones(3, 2), "another")).unsqueeze_(0)
    assert forward(x).shape == (3, 2) and forward(x).origins == {"the output of 'far'"}


def test_an_answer_first_asked_for_in_inference_mode_serves_training() -> None:
    forward = AbsentForward(made_absent(nn.Linear(4, 2)), "far")
    with torch.inference_mode():
        forward(torch.ones(3, 4))
    answer = forward(torch.ones(3, 4))
    loss = (answer.mul_(2) * nn.Parameter(torch.ones(2))).sum()
    assert loss.requires_grad and not answer.is_inference()


def test_later_calls_in_a_step_have_an_origin_of_their_own() -> None:
    forward = AbsentForward(made_absent(nn.Linear(4, 2)), "far")
    assert forward.answer((torch.ones(3, 4),), {}, call=1).origin == "the output of 'far' (call 2)"
    assert forward(torch.ones(3, 4)).origin == "the output of 'far'"
