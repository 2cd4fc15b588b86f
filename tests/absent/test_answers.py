"""What a module without values answers: the structure of what it would return, whatever it asks for inside."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack, to_dlpack

from lightning_parallel.absent.answers import ANSWERS_KEPT, AbsentForward
from lightning_parallel.absent.tensor import AbsentTensor, AbsentValueError, absent_like
from tests.absent.test_tensor import made_absent
from tests.pipeline.nets import Calls


def absent_forward(module: nn.Module, name: str) -> Callable[..., Any]:
    """It is called as the module is."""
    forward = AbsentForward(module, name)
    return lambda *args, **kwargs: forward.answer(args, kwargs)


def pair(m: Any, x: Tensor) -> dict[str, Any]:
    """A dict of tuples, an int among them; something changed in place."""
    y = m.layer(x)
    y[:, 0].zero_()
    return {"pair": (y, y.sum(-1)), "count": 3, "none": None}


TWINS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batchnorm2d": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    "lstm": (lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, dropout=0.1), (5, 4, 8)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (3, 4, 8)),
    "pair": (lambda: Calls(pair, layer=nn.Linear(8, 8)), (3, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), (2, 8)),
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
        forward = absent_forward(made_absent(module), "far")
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


def counting() -> Any:
    """Counts how often its forward runs, in a list: a number of its own would be a setting."""

    def run(m: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        m.inputs.append(x)
        result = m.layer(x)
        return (result, result) if m.training else result

    return made_absent(Calls(run, layer=nn.Linear(4, 2), inputs=[]))


class Colour(Enum):
    RED = 1
    BLUE = 2


def test_the_module_is_asked_once_for_each_kind_of_input() -> None:
    module = counting()
    forward = absent_forward(module, "far")
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
    assert len(module.inputs) == len(kinds)


def test_answers_are_kept_for_the_inputs_that_came_last() -> None:
    """A step that hands a layer a number that counts up must not fill the memory."""
    module = counting()
    forward = absent_forward(module, "far")
    x = torch.ones(3, 4)
    for number in range(3 * ANSWERS_KEPT):
        forward(x)
        forward(x, number)
    assert len(module.inputs) == 1 + 3 * ANSWERS_KEPT  # what comes again and again is asked once
    forward(x, 0)
    assert len(module.inputs) == 2 + 3 * ANSWERS_KEPT  # what came long ago was forgotten


@pytest.mark.parametrize("makes", [False, True])
def test_an_object_in_an_answer_is_this_call_s_and_what_it_says_of_shapes_counts(makes: bool) -> None:
    """Of a class that torch's containers don't know. The layer hands it on, or one that it makes."""

    def narrow(m: Any, x: Tensor, settings: Any) -> tuple[Tensor, Any]:
        return m.layer(x)[:, : settings.width], SimpleNamespace(width=settings.width) if makes else settings

    forward = absent_forward(made_absent(Calls(narrow, layer=nn.Linear(4, 4))), "far")
    x, given = torch.ones(3, 4), [SimpleNamespace(width=width) for width in (2, 2, 3)]
    answers = [forward(x, settings) for settings in given]
    assert [answer.shape for answer, _ in answers] == [(3, 2), (3, 2), (3, 3)]
    assert answers[0][1] is not answers[1][1]
    assert makes or all(settings is each for (_, settings), each in zip(answers, given, strict=True))
    given[0].width = 1
    assert forward(x, given[0])[0].shape == (3, 1)


def test_the_answer_follows_autocast_and_the_mode() -> None:
    module = counting()
    forward = absent_forward(module, "far")
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


# -- modules that can't be asked on absent tensors ---------------------------------------------------------------------


def dispatch(m: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """The tokens of each expert, found by their values, written into a tensor made here."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(m.experts):
        rows = (chosen == i).nonzero().flatten()
        if len(rows) > 0:
            out[rows] = expert(x[rows])
    return out


def experts() -> Any:
    return Calls(dispatch, experts=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))


def routed(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = m.gate(x)
    return m.experts(x, scores.argmax(-1)), scores


def asks(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(x)[:, m.table]
    return y if bool(y.isfinite().all()) else y.nan_to_num()


def fills(m: Any, x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], 2)
    for t in range(2):
        out[:, t] = m.layer(x)[:, t]
    return out


def reads_memory(m: Any, x: Tensor) -> Tensor:
    """As a Triton kernel does, which gets the address of a tensor."""
    y: Tensor = m.layer(x)
    assert len(ctypes.string_at(y.data_ptr(), y.nbytes)) == y.nbytes
    return y


def reads_memory_in_cpp(m: Any, x: Tensor) -> Tensor:
    return from_dlpack(to_dlpack(m.layer(x).detach()))


@pytest.mark.parametrize("function", [routed, asks, fills, reads_memory, reads_memory_in_cpp])
def test_a_module_that_needs_values_is_run_on_stand_ins(function: Callable[..., Any]) -> None:
    parts = {"gate": nn.Linear(4, 3), "experts": experts()} if function is routed else {"layer": nn.Linear(4, 4)}
    module = Calls(function, **parts, table=nn.Buffer(torch.arange(4)))
    expected = module(torch.ones(5, 4))
    before = torch.get_rng_state()
    absent = made_absent(module)
    answer = absent_forward(absent, "far")(torch.ones(5, 4))
    for found, real in zip(pytree.tree_leaves(answer), pytree.tree_leaves(expected), strict=True):
        assert isinstance(found, AbsentTensor) and found.shape == real.shape and found.dtype == real.dtype
        assert found.origins == {"the output of 'far'"}
    assert all(isinstance(p, AbsentTensor) for p in absent.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_hooks_are_never_shown_stand_ins() -> None:
    module = experts()
    module.experts[0].register_forward_hook(lambda module, args, output: pytest.fail("shown"))
    with pytest.raises(AbsentValueError, match="nonzero"):
        absent_forward(made_absent(module), "far")(torch.ones(5, 4), torch.zeros(5, dtype=torch.int64))
