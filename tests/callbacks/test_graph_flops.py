"""callbacks/graph_flops.py: the graph of a loss tells what torch's counter of FLOPs counts while it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.callbacks.graph_flops import ForwardFlops
from tests.flops import flop_counter


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_submodule(name).requires_grad_(False)
    return module


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4, stride=2),
        nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2), nn.Flatten(), nn.Linear(6 * 15 * 15, 5),
    )  # fmt: skip


class Products(nn.Module):
    """Of matrices, as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        scores = torch.einsum("bqd,bkd->bqk", x, y)
        return torch.baddbmm(y, scores.softmax(-1), x)


class Attends(nn.Module):
    """With different numbers of queries and keys, of which only one needs a gradient."""

    def __init__(self, trained: str) -> None:
        super().__init__()
        self.trained, self.scale = trained, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        given = {"query": x[:, :3], "key": x, "value": x}
        given[self.trained] = given[self.trained] * self.scale
        return F.scaled_dot_product_attention(*(each.unsqueeze(1) for each in given.values()))


def flops_of(loss: Tensor) -> int | None:
    forward = ForwardFlops()
    forward.add(loss)
    return forward.total


def counted(forward: Callable[[], Tensor]) -> int:
    with flop_counter() as counter:
        forward()
    return counter.get_total_flops()


TOKENS, IMAGES = (2, 7, 16), (2, 3, 16, 16)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), TOKENS),
        (lambda: nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4)), TOKENS),
        (lambda: frozen(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), "1"), TOKENS),
        (lambda: nn.GRU(16, 8), TOKENS),
        (Products, TOKENS),
        (convolutions, IMAGES),
        (lambda: frozen(convolutions(), "2", "3"), IMAGES),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_what_is_counted_is_what_has_run(make: Callable[[], nn.Module], shape: Any, precision: str) -> None:
    module, x = make(), torch.randn(shape)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            output = module(x)
        return (output[0] if isinstance(output, tuple) else output).float().sum()

    assert flops_of(loss()) == counted(loss) > 0


@pytest.mark.parametrize("trained", ["query", "key", "value"])
def test_attention_counts_whichever_of_its_inputs_needs_a_gradient(trained: str) -> None:
    module, x = Attends(trained), torch.randn(2, 7, 16)
    assert flops_of(module(x).sum()) == counted(lambda: module(x)) == 2 * (2 * 2 * 3 * 7 * 16)


def test_a_checkpoint_counts_once_and_is_not_run_for_it() -> None:
    module, runs = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), []
    module.register_forward_hook(lambda *_: runs.append(1))
    x = torch.randn(TOKENS, requires_grad=True)
    loss = checkpoint(module, x, use_reentrant=False).sum()
    assert flops_of(loss) == counted(lambda: module(x).sum())
    assert len(runs) == 2  # that of the counter is the second one
    loss.backward()  # which needs the checkpoint


def test_what_losses_have_in_common_counts_once() -> None:
    trunk, heads = nn.Linear(16, 8), [nn.Linear(8, 2), nn.Linear(8, 3)]
    h = trunk(torch.randn(5, 16))
    forward = ForwardFlops()
    for head in heads:
        forward.add(head(h).sum())
    assert forward.total == 2 * 5 * (16 * 8 + 8 * 2 + 8 * 3)


def test_what_a_backward_has_freed_is_not_asked_again() -> None:
    """Of a transposed convolution whose input needs no gradient, the saved input tells the size."""
    generator, forward = nn.ConvTranspose2d(3, 2, 2), ForwardFlops()
    for times in (1, 2):
        loss = generator(torch.randn(1, 3, 4, 4)).sum()
        forward.add(loss)
        assert forward.total == times * 2 * (3 * 4 * 4) * (2 * 2 * 2)
        loss.backward()


class OfTheUser(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x @ x.mT

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


@pytest.mark.parametrize(
    "hides",
    [
        OfTheUser.apply,
        torch.compile(lambda x: x.sin(), backend="aot_eager"),
        lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    ],
)
def test_what_the_graph_does_not_show_is_not_guessed(hides: Any) -> None:
    assert flops_of(hides(nn.Linear(16, 16)(torch.randn(16, 16))).sum()) is None


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=layout, requires_grad=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "heavy",
    [
        lambda: nn.LSTM(4, 4)(torch.ones(3, 2, 4))[0],
        lambda: nn.Bilinear(3, 3, 2)(torch.ones(2, 3), torch.ones(2, 3)),
        lambda: torch.ones(3, 3, requires_grad=True) @ torch.ones(3),
        lambda: torch.sparse.mm(torch.eye(3).to_sparse().requires_grad_(), torch.ones(3, 3)),
        lambda: F.linear(nested(torch.jagged), torch.ones(4, 4)).values(),
        lambda: torch.bmm(nested(torch.strided), torch.ones(2, 4, 4)).to_padded_tensor(0.0),
    ],
)
def test_what_computes_much_and_has_no_formula_is_not_counted_as_nothing(heavy: Callable[[], Tensor]) -> None:
    assert flops_of(heavy().sum()) is None


def test_a_loss_without_a_graph_counts_nothing() -> None:
    assert flops_of(torch.ones(())) == 0
