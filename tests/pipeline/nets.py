"""Models that the tests of the pipeline cut: one for each way in which code between and inside layers can be written.

All have layers ``blocks.*`` and take rows of three numbers; `step` is what a LightningModule's training_step is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BLOCKS: dict[str, Any] = {"layers": ["blocks.*"]}


class Net(nn.Module):
    """Embedding, blocks, head; subclasses change a part. `step` is what a LightningModule's training_step is."""

    width = 6

    class Block(nn.Sequential):
        def __init__(self, width: int) -> None:
            super().__init__(nn.Linear(width, width), nn.Tanh())

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(3, self.width)
        self.blocks = nn.ModuleList(self.block() for _ in range(blocks))
        self.head = nn.Linear(self.width, 2)

    def block(self) -> nn.Module:
        return self.Block(self.width)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def step(self, x: Tensor) -> Any:
        return self.head(self.body(self.stem(x))).square().mean()


class Calls(nn.Module):
    """A function of modules and parameters."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


class Glue(Net):
    """Code between the layers: masks and positions made from shapes, scaling, residuals, reshapes, in place too."""

    def step(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        position = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)[:, None]
        mask = torch.ones_like(x).tril()
        for i, block in enumerate(self.blocks):
            x = x + 0.1 * position
            y = block(x.reshape(-1, self.width)).view_as(x)
            x = x + y * mask
            x *= 0.5 + i
            x[:, 0] = 1.0
        return self.head(x.flatten(0, 0)).square().mean()


class UNet(Net):
    """Skip connections over all cuts, of the stem and of layers, changed in place on the way."""

    def step(self, x: Tensor) -> Tensor:
        stem = x = self.stem(x)
        downs = []
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
            downs.append(x)
        x = x * 2
        for block, skip in zip(self.blocks[half:], reversed(downs), strict=True):
            x = block(x + skip)
        return self.head(x + stem).square().mean()


class Views(Net):
    """The same layers for two views of a batch, one after the other: the end of the first comes before the second."""

    def step(self, x: Tensor) -> Tensor:
        losses = [self.head(self.body(self.stem(view))).square().mean() for view in (x, x.cos())]
        return losses[0] * 2 + losses[1]


class Cycle(Net):
    """The first blocks once more, on what the last ones return; and all of them on another input in between."""

    def step(self, x: Tensor) -> Tensor:
        def first(x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x))

        def second(x: Tensor) -> Tensor:
            return self.blocks[3](self.blocks[2](x))

        there, other = (second(first(self.stem(each))) for each in (x, x.cos()))
        return (self.head(first(there)) - self.head(other)).square().mean()


class SkipInPlace(Net):
    """What crosses is changed in place where it is made, and again at the end. Every stage makes the first change, to
    the value as it was."""

    def step(self, x: Tensor) -> Tensor:
        skip = self.stem(x)
        x = skip * 1.5
        skip.mul_(2)
        skip += self.body(x)
        return self.head(skip).square().mean()


class PassesThrough(Net):
    """Layers take and return names: of one tensor twice, of what came in, of a parameter, and of what is no tensor."""

    def block(self) -> nn.Module:
        return Calls(self.passes, layer=nn.Linear(self.width, self.width))

    @staticmethod
    def passes(m: Any, *, twice: Any, passed: Any = 0.0, bias: Any = 1.0, scale: float, **_: Any) -> dict[str, Any]:
        z = m.layer(twice[0] + twice[1] * scale + passed * bias).tanh()
        return {"twice": (z, z), "passed": twice[0], "bias": m.layer.bias, "scale": scale, "none": None}

    def step(self, x: Tensor) -> Tensor:
        values: dict[str, Any] = {"twice": (self.stem(x),) * 2, "scale": 0.5}
        for block in self.blocks:
            values = block(**values)
        return self.head(values["twice"][1] + values["passed"] * values["bias"]).square().mean()


class SameModulesTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*self.blocks)
        self.last = self.blocks[3]

    def step(self, x: Tensor) -> Tensor:
        return self.head(self.net(self.stem(x))).square().mean()


class MultiExit(Net):
    """The head runs on every block's output."""

    def step(self, x: Tensor) -> Any:
        x = self.stem(x)
        outputs = [x := block(x) for block in self.blocks]
        return sum(self.head(output).square().mean() for output in outputs)


Code = Callable[[Any, Tensor], Any]  # of a step, given the model


def nothing(model: Any, x: Tensor) -> Tensor:
    return x


class Around(Net):
    """Does something with what it keeps: before its blocks, after the second one, and at the end. ``blocks``: layers of
    another kind."""

    def __init__(
        self,
        kept: Any = None,
        before: Code = nothing,
        after: Code = nothing,
        blocks: Mapping[int, nn.Module] = {},
        between: Code = nothing,
    ) -> None:
        super().__init__()
        self.kept = copy.deepcopy(kept)
        self.before, self.between, self.after = before, between, after
        for i, block in blocks.items():
            self.blocks[i] = block

    def body(self, x: Tensor) -> Tensor:
        x = self.between(self, self.blocks[1](self.blocks[0](x)))
        return self.blocks[3](self.blocks[2](x))

    def step(self, x: Tensor) -> Tensor:
        return self.after(self, self.head(self.body(self.before(self, self.stem(x))))).sum()
