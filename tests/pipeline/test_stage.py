"""The user's step, cut: stages run by hand, one after the other, do what the whole model does.

No processes here: what a stage sends is handed to the next (by_hand.py).
"""

from __future__ import annotations

import warnings
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pipeline import by_hand
from tests.pipeline.by_hand import forward, stages_of
from tests.pipeline.nets import (
    BLOCKS,
    Calls,
    Cycle,
    Glue,
    MultiExit,
    Net,
    PassesThrough,
    SameModulesTwice,
    SkipInPlace,
    UNet,
)

pytestmark = pytest.mark.usefixtures("in_double_precision")


X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)


def step(model: Any) -> Any:
    return model.step(X)


def assert_equal_to_the_whole(model: nn.Module, step: by_hand.Step, stages: int, **options: Any) -> by_hand.Result:
    loss, gradients = by_hand.plain(model, step)
    result = by_hand.run(model, step, stages, **options)
    torch.testing.assert_close(result.output.detach(), loss, rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        assert name in result.gradients, name
        torch.testing.assert_close(
            result.gradients[name], gradient, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    extra = {name for name in result.gradients if name not in gradients}
    assert all(not result.gradients[name].any() for name in extra)
    return result


class PenaltyOnAll(Net):
    def step(self, x: Tensor) -> Tensor:
        return super().step(x) + sum(p.square().sum() for p in self.parameters())


class KeepsPenalties(Net):
    """Each block, and a layer inside it, keeps a number that it computes from its parameters alone, as a Bayesian
    layer keeps its divergence."""

    class Block(nn.Module):
        def __init__(self, width: int, depth: int = 1) -> None:
            super().__init__()
            self.scale, self.spread = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
            self.inner = type(self)(width, depth - 1) if depth else nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            self.penalty = (self.scale.square() + self.spread.exp()).sum()
            return self.inner(x * self.scale)  # type: ignore[no-any-return]

    def step(self, x: Tensor) -> Tensor:
        return super().step(x) + sum(m.penalty for m in self.modules() if isinstance(m, self.Block))


class GivesModules(Net):
    """Its layers call another unit, which they are given; the last one gives a part of its own what it computes from
    the weight of one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(self.width, self.width)
        self.head = Calls(lambda m, x, stem: m.layer(x @ stem.weight), layer=nn.Linear(3, 2))

    def block(self) -> nn.Module:
        return Calls(lambda m, x, other: m.layer(x).tanh() + other(x), layer=nn.Linear(self.width, self.width))

    def step(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, self.other)
        return self.head(x, self.stem).square().mean()


class Hooked(Net):
    """Hooks of the user's that change what layers return."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: output * 2)
            block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


class DirectNow(Net):
    def body(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block.forward(x) if i % 2 else block(x)
        return x


class InferredInside(Net):
    """A first layer that is frozen and called in inference mode, and needed after the layers that have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def step(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.inference_mode():
            frozen = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x + frozen)
        return (self.head(x) * frozen.mean()).pow(2).mean()


# Others are trained as modules, such as those of the contract.
NETS = [Glue, UNet, Cycle, SkipInPlace, PassesThrough, SameModulesTwice, MultiExit, InferredInside]
READING = [PenaltyOnAll, KeepsPenalties, GivesModules, Hooked, DirectNow]


@pytest.mark.parametrize(("kind", "recompute"), [
    *((kind, False) for kind in NETS), *product(READING, (False, True)),
])  # fmt: skip
def test_loss_and_gradients_equal_the_whole_models(kind: type[Net], recompute: bool) -> None:
    assert_equal_to_the_whole(kind(), step, 4, **BLOCKS, balance="layers", recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_step_equals_the_whole_models(recompute: bool) -> None:
    def compiled(model: Any) -> Any:
        return torch.compile(model.step, backend="aot_eager")(X)

    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know")  # our own code is none for it
        assert_equal_to_the_whole(UNet(2), compiled, 2, **BLOCKS, recompute=recompute)


class Changes(Net):
    """Its step goes another way later on."""

    how = ""

    class Block(nn.Linear):
        grows = False

        def __init__(self, width: int) -> None:
            super().__init__(width, width)

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return (y, y) if self.grows and type(x) is Tensor else (y,)

    def step(self, x: Tensor) -> Tensor:
        first = hidden = self.stem(x)
        second = first if self.how == "forgets" else self.stem(2 * x)
        if self.how == "ends":
            return first.sum()
        for block in self.blocks:
            block.grows = self.how == "grows"
            hidden = block(hidden)[0]
        return self.head(hidden + second).square().mean()


@pytest.mark.parametrize(("how", "words"), [
    ("ends", "The step has ended on stage 0 of 2, before it called what later ones own"),
    ("grows", r"'blocks.\d' returned 2 tensors, but 1 in the dry run"),
    ("forgets", r"'stem' was not called as in the first step \(call 2\)"),
])  # fmt: skip
def test_a_step_that_goes_another_way_than_the_first_one_is_named(how: str, words: str) -> None:
    made = stages_of(Changes(), step, 2, **BLOCKS)
    made[0].module.how = how  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=words):
        made[0].run(lambda: step(made[0].module), None, 0)


# -- the step around the cut -------------------------------------------------------------------------------------------


class Careful(Net):
    def __init__(self) -> None:
        super().__init__()
        self.caught = False

    def body(self, x: Tensor) -> Tensor:
        try:
            return super().body(x)
        except Exception:
            self.caught = True
            raise


def test_leaving_the_step_is_no_exception_that_user_code_catches() -> None:
    made = stages_of(Careful(), step, 2, **BLOCKS)
    forward(made, step)
    assert not any(stage.module.caught for stage in made)


# -- random numbers ----------------------------------------------------------------------------------------------------


class Noisy(Net):
    """Dropout in the layers, noise of the step's own before, between and after them."""

    together: tuple[int, ...] = ()  # numbers of layers in a checkpoint

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.Dropout(0.5), nn.Tanh())

    def step(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        x = self.stem(x + noise)
        i = 0
        while i < len(self.blocks):
            if i in self.together:
                x = checkpoint(self.both, x, i, use_reentrant=False)
                i += 2
            else:
                x = self.blocks[i](x)
                i += 1
            x = x * torch.rand(())
        return (self.head(x)[:, :1] - noise[:, :1] * torch.rand(())).square().mean()

    def both(self, x: Tensor, i: int) -> Tensor:
        return self.blocks[i + 1](self.blocks[i](x) * torch.rand(()))


def noisy(stages: int, *together: int) -> by_hand.Result:
    torch.manual_seed(1)
    model = Noisy()
    model.together = together

    def seeded_step(model: Any) -> Any:
        torch.manual_seed(7)  # as the engine does, with the same seed on every stage
        return model.step(X)

    return by_hand.run(model, seeded_step, stages, **BLOCKS, balance="layers")


def test_a_checkpoint_of_several_layers_draws_the_same_again() -> None:
    """Dropout masks of the second run, in the backward, are those of the first."""
    whole, cut = noisy(1), noisy(2, 0, 2)
    torch.testing.assert_close(cut.output, whole.output, rtol=0, atol=1e-12)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(cut.gradients[name], gradient, rtol=0, atol=1e-12)


def test_a_checkpoint_over_a_cut_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"'blocks.2' runs again in the backward of stage 1.*Checkpoint each layer"):
        noisy(2, 1)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_gradients_that_are_sent_back_are_freed_though_the_loss_is_kept() -> None:
    made = stages_of(UNet(), step, 2, **BLOCKS)
    loss, _, (arrival,) = forward(made, step)
    with made[-1].backward():
        loss.backward()
    memory = [weakref.ref(gradient.untyped_storage()) for gradient in arrival.gradients()]
    assert memory
    assert [each for each in memory if each() is not None] == []
    assert loss.grad_fn is not None


# -- what would be silently different ----------------------------------------------------------------------------------


class ChangesInput(Net):
    """A layer works in place on what the step uses again."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(self.width, self.width))

    def step(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = []
        for block in self.blocks:
            kept.append(x)
            x = block(x)
        return self.head(x + sum(kept)).square().mean()


class FillsList(Net):
    def block(self) -> nn.Module:
        return Calls(lambda m, x, seen: seen.append(x.mean()) or m.layer(x), layer=nn.Linear(self.width, self.width))

    def step(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, seen)
        return self.head(x).square().mean() + sum(seen)


class ReturnsNumber(Net):
    def block(self) -> nn.Module:
        return Calls(lambda m, x: (m.layer(x), x.abs().max().item()), layer=nn.Linear(self.width, self.width))

    def step(self, x: Tensor) -> Tensor:
        x, scales = self.stem(x), 0.0
        for block in self.blocks:
            x, scale = block(x)
            scales += scale
        return self.head(x / scales).square().mean()


class HooksBackwards(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


@pytest.mark.parametrize(("kind", "words"), [
    (ChangesInput, r"uses what 'blocks.\d' changes in place, on stage 0"),
    (FillsList, "A Calls writes into a list that it is given"),
    (ReturnsNumber, r"'blocks.\d' returns numbers, or tensors of a shape, that depend on values"),
    (HooksBackwards, r"'blocks.\d' has a full backward hook, and its output crosses a cut"),
])  # fmt: skip
def test_what_other_stages_could_not_see_is_refused_in_the_look(kind: type[Net], words: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        stages_of(kind(), step, 2, **BLOCKS)
