"""The two halves of a backward give what one whole backward gives, and each hook runs once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.pytorch_utils import Conv1D

from lightning_parallel.backward.split import WeightGradients, begin_backward
from lightning_parallel.private.torch.tensors import TorchDispatchMode
from tests.pipeline.nets import Calls

D = 6


pytestmark = pytest.mark.usefixtures("in_double_precision")


# -- both ways ---------------------------------------------------------------------------------------------------


def begin(output: Tensor, *inputs: Tensor) -> WeightGradients:
    """The first half of a backward whose gradients are not all the same."""
    gradient = torch.linspace(-1, 2, output.numel(), dtype=output.real.dtype).to(output.dtype).view(output.shape)
    return begin_backward([get_gradient_edge(output)], [gradient], inputs)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.to_dense() if p.grad.is_sparse else p.grad.clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def late(module: nn.Module, *inputs: Tensor, autocast: bool = False) -> set[str]:
    """The names of the parameters whose gradients wait, after a comparison of all gradients, bit by bit."""
    found = []
    for one, split in ((copy.deepcopy(module), False), (module, True)):
        given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        one.zero_grad()
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            output = one(*given)
        rest = begin(output, *(given if split else ()))
        early = gradients(one)
        assert split or not rest._parts
        waits = bool(rest._parts)
        rest.run()
        assert not rest._parts
        found.append({**gradients(one), **{f"input {i}": x.grad for i, x in enumerate(given) if x.grad is not None}})
    whole, halves = found
    assert whole.keys() == halves.keys()
    for name, gradient in whole.items():
        assert torch.equal(gradient, halves[name]), f"{name}: {(gradient - halves[name]).abs().max()}"
    assert all(torch.equal(gradient, halves[name]) for name, gradient in early.items()), "in both halves"
    names = {name for name in halves.keys() - early.keys() if not name.startswith("input")}
    assert bool(names) == waits
    return names


def x(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def weight(*shape: int, **how: Any) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, **how))


# -- which weights wait ------------------------------------------------------------------------------------------


class Named(Tensor):
    pass


# A layer, the input's shape, and the parameters that wait.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "also used otherwise": (lambda: Calls(lambda m, a: m.linear(a) * m.linear.weight.sum(), linear=nn.Linear(D, D)),
        (3, D), set()),
    "in chunks, one used otherwise": (lambda: Calls(lambda m, a: F.linear(a, m.w[:D]) * m.w[D], w=weight(D + 1, D)),
        (3, D), set()),
    "weight norm": (lambda: Calls(lambda m, a: m.linear(m.linear(a)), linear=weight_norm(nn.Linear(D, D))),
        (3, D), {f"linear.parametrizations.weight.original{i}" for i in (0, 1)}),
    "made from the input": (lambda: Calls(lambda m, a: F.linear(a, m.linear(a)), linear=nn.Linear(D, D, bias=False)),
        (3, D), {"linear.weight"}),
    "norms, changed in place": (
        lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 4), nn.ReLU(True), nn.Linear(4, D)),
        (3, D), {"0.weight", "2.weight", "4.weight"},
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 2, groups=2, stride=2, padding=1, dilation=2, bias=False),
            nn.Conv2d(4, 2, 1),
            nn.ConvTranspose2d(2, 3, 2, stride=2, output_padding=1, bias=False),
        ),
        (2, 2, 6, 6), {"0.weight", "2.weight", "4.weight"},
    ),
    "recurrent": (lambda: Calls(lambda m, a: m.linear(m.gru(a)[0]), gru=nn.GRU(D, 4), linear=nn.Linear(4, 2)),
        (3, 2, D), {"gru.weight_ih_l0", "linear.weight"}),
    "Conv1D used again": (lambda: Calls(lambda m, a: m.c(m.c(m.c(a))), c=Conv1D(D, D)), (3, D), {"c.weight"}),
    "weight on the left": (
        lambda: Calls(lambda m, a: (m.v @ a + m.w.t() @ a) @ m.u, v=weight(4, 3), w=weight(3, 4), u=weight(D, 1)),
        (3, D), {"u", "v", "w"},
    ),
    "experts": (
        lambda: Calls(lambda m, a: m.v @ torch.einsum("ebd,edf->ebf", a, m.w), v=weight(2, 5, 4), w=weight(2, D, 3)),
        (2, 4, D), {"v", "w"},
    ),
    "scaled": (lambda: Calls(lambda m, a: torch.addmm(m.b, a, m.w, alpha=2), b=weight(D), w=weight(D, D)),
        (3, D), set()),
    "of no activation": (lambda: Calls(lambda m, a: torch.addmm(a, m.u * 2, m.v * 2), u=weight(3, 4), v=weight(4, D)),
        (3, D), set()),
    "sparse": (lambda: Calls(lambda m, a: m.linear(m.w.to_sparse() @ a), w=weight(3, 3), linear=nn.Linear(D, 2)),
        (3, D), {"linear.weight"}),
    "of a tensor of another class": (
        lambda: Calls(
            lambda m, a: m.second(m.first(a).as_subclass(Named)), first=nn.Linear(D, D), second=nn.Linear(D, 2)
        ),
        (3, D), {"first.weight"},
    ),
    "added to embeddings": (
        lambda: Calls(lambda m, a: m.linear(a) + m.e(torch.tensor([0, 1, 1])), e=nn.Embedding(4, D, sparse=True),
                      linear=nn.Linear(D, D)),
        (3, D), {"linear.weight"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_a_whole_backward(name: str) -> None:
    make, shape, expected = LAYERS[name]
    assert late(make(), x(*shape)) == expected


def llama(layers: int = 1, **how: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(**{**sizes, **how}, num_hidden_layers=layers, vocab_size=8))
    return Calls(lambda m, a: m.model(inputs_embeds=a, use_cache=False)[0], model=model)


def matrices(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.dim() == 2 and "embed" not in name}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp64", "bf16"])
@pytest.mark.parametrize(("make", "lengths"), [
    (lambda: llama(2), [2]),
    (lambda: nn.TransformerDecoderLayer(16, 4, 32), [5, 3]),  # whose attention is the encoder's, too
])  # fmt: skip
def test_all_matrices_of_a_transformer_wait(make: Callable[[], nn.Module], lengths: list[int], autocast: bool) -> None:
    module, dtype = make(), torch.float32 if autocast else torch.float64
    inputs = [x(length, 5, 16, dtype=dtype) for length in lengths]
    assert late(module.to(dtype), *inputs, autocast=autocast) == matrices(module)


class Own(torch.autograd.Function):
    """With an anchor, a leaf that is nobody's parameter, as functions have that must run in each backward."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, a: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, w)
        return a @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Own.runs += 1
        a, w = ctx.saved_tensors
        return None, gradients[0] @ w.t(), a.t() @ gradients[0]


class Passed(torch.autograd.Function):
    """Its backward hands the gradient on, or none."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, stops: bool) -> Tensor:  # type: ignore[override]
        ctx.stops = stops
        return a.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None if ctx.stops else gradients[0], None


def test_functions_of_users_are_done_in_the_first_half() -> None:
    module = Calls(
        lambda m, a: m.linear(Own.apply(torch.empty((), requires_grad=True), m.linear(a), m.w)),
        linear=nn.Linear(D, D),
        w=weight(D, D),
    )
    assert late(module, x(3, D)) == {"linear.weight"}
    passed = Calls(lambda m, a: m.linear(a) @ Passed.apply(m.w, False), linear=nn.Linear(D, D), w=weight(D, D))
    assert late(passed, x(3, D)) == {"linear.weight"}  # the function's node may be gone before the second half
    Own.runs = 0
    side = Calls(lambda m, a: m.linear(a) + Own.apply(torch.empty((), requires_grad=True), torch.ones(3, D), m.w),
                 linear=nn.Linear(D, D), w=weight(D, D))  # fmt: skip
    assert late(side, x(3, D)) == {"linear.weight"} and Own.runs == 2


# -- what the backward begins and ends with ----------------------------------------------------------------------


def test_several_outputs_and_inputs_need_not_depend_on_one_another() -> None:
    layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
    found = []
    for split in (False, True):
        layers.zero_grad()
        inputs = [x(3, D), x(3, D), x(3, D)]
        with torch.no_grad():
            for i, each in enumerate(inputs):
                each.copy_(torch.arange(3.0 * D).view(3, D) + i)
        outputs = [layers[0](inputs[0]) + layers[1](inputs[1]), layers[1](inputs[0]), layers[2](torch.ones(2, D))]
        gradients = [torch.full_like(output, 2.0 + i) for i, output in enumerate(outputs)]
        rest = begin_backward([get_gradient_edge(o) for o in outputs], gradients, inputs if split else [])
        assert len(rest._parts) == (2 if split else 0)
        assert layers[2].weight.grad is not None and (layers[1].weight.grad is None) == split
        rest.run()
        found.append([p.grad for p in (*layers.parameters(), *inputs)])
    assert found[0][-1] is None and found[0][6] is None
    assert all(one is other or torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_weight_that_is_an_output_too_does_not_wait() -> None:
    linear, given = nn.Linear(D, D, bias=False), torch.arange(3.0 * D).view(3, D).requires_grad_()
    outputs = [linear(given), linear.weight.t(), linear(given)]
    rest = begin_backward([get_gradient_edge(o) for o in outputs], [torch.ones_like(o) for o in outputs], [given])
    assert not rest._parts
    assert torch.equal(linear.weight.grad, 2 * given.detach().sum(0).expand(D, D) + 1)  # type: ignore[arg-type]


def test_a_weight_that_no_gradient_reaches_has_none() -> None:
    layers = {name: nn.Linear(D, D) for name in ("first", "second")}
    module = Calls(lambda m, a: Passed.apply(m.first(a), True) + m.second(a), **layers)
    assert late(module, x(3, D)) == {"second.weight"}
    assert module.first.weight.grad is None


@pytest.mark.parametrize("what", ["activation", "gradient"])
def test_a_tensor_that_is_changed_between_the_halves_is_told(what: str) -> None:
    linear, given, kept = nn.Linear(D, D), x(3, D), []
    hidden = given * 2
    output = linear(hidden)
    output.register_hook(kept.append)
    rest = begin(output, given)
    with torch.no_grad():
        (hidden if what == "activation" else kept[0]).add_(1)
    with pytest.raises(RuntimeError, match=r"shape \[3, 6\].*changed in place between"):
        rest.run()


# -- hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", ["once", "twice", "cast", "directly"])
def test_hooks_on_parameters_run_once_with_the_whole_gradient(used: str) -> None:
    linear = Conv1D(D, D) if used == "directly" else nn.Linear(D, D)
    linear = linear.float() if used == "cast" else linear
    calls: list[tuple[str, str, Tensor]] = []
    for name, p in linear.named_parameters():
        p.register_hook(lambda g, name=name: calls.append(("hook", name, g.clone())) or g * 2)  # type: ignore[func-returns-value]
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(("after", name, p.grad.clone())))
    found = []
    for split in (False, True):
        linear.zero_grad()
        calls.clear()
        given = torch.ones(3, D, dtype=linear.weight.dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16) if used == "cast" else nullcontext():
            output = linear(linear(given)) if used == "twice" else linear(given)
        rest = begin(output, *([given] if split else []))
        assert split == ("weight" not in [name for _, name, _ in calls])
        rest.run()
        found.append(sorted(calls, key=lambda call: call[:2]))
    whole, halves = found
    assert len(whole) == len(halves) == 4
    for one, other in zip(whole, halves, strict=True):
        assert one[:2] == other[:2] and torch.equal(one[2], other[2])


# -- layers that run again, saved tensors that are elsewhere -----------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_user_s_checkpoint_runs_again_once_in_the_first_half(reentrant: bool) -> None:
    runs = []

    def forward(m: Any, a: Tensor) -> Tensor:
        def inner(b: Tensor) -> Tensor:
            runs.append(1)
            return m.inside(b).tanh()

        return m.after(checkpoint(inner, m.before(a), use_reentrant=reentrant))

    module = Calls(forward, before=nn.Linear(D, D), inside=nn.Linear(D, D), after=nn.Linear(D, D))
    assert late(module, x(3, D)) == (set() if reentrant else {"before.weight", "after.weight"})
    assert len(runs) == 4


# -- memory ------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """The memory of what operators return, but for tensors that there were before."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {each.data_ptr() for each in known}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.known:
                storage = each.untyped_storage()
                reference = StorageWeakRef(storage)
                self.made[reference.cdata] = (reference, storage.nbytes())
        return out

    def held(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


def test_what_waits_holds_about_as_much_as_the_forward_did() -> None:
    module = llama(hidden_size=32, intermediate_size=96)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    given = x(4, 32, 32)
    stay = [given, *module.buffers(), *(each for p in module.parameters() for each in (p, p.grad))]
    with Allocations(*stay) as memory:
        output = module(given)
        edges, gradient = [get_gradient_edge(output)], torch.ones_like(output)
        del output
        forward = memory.held() - gradient.nbytes
        rest = begin_backward(edges, [gradient], [given])
        del edges, gradient
        given.grad = None
        between = memory.held()
        rest.run()
        assert memory.held() == 0
    assert 0 < between <= 1.3 * forward, (between / forward, forward)
