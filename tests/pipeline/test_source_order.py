"""The order in which a module's methods use its children, as their source has it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

from lightning_parallel.pipeline.source_order import SourceOrder


class InOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.blocks, self.first = nn.Linear(2, 2), nn.ModuleList(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x) if self.last is not None else x
        return x


class OnBothSides(InOrder):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.blocks[0](x) + self.first(x)


class MethodsDisagree(InOrder):
    def encode(this, x: Tensor) -> Tensor:
        return this.blocks[0](this.last(x))


class Nested(InOrder):
    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.last(y) for y in [block(self.first(x)) for block in self.blocks]]
        return sum(outputs, start=self.after(*outputs, scale=self.scale))


class Step(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.encode(batch)
        return self.head(hidden).sum()

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x))


@pytest.mark.parametrize(("kind", "child", "other", "behind"), [
    (InOrder, "first", "blocks", False),
    (InOrder, "last", "blocks", True),
    (InOrder, "last", "first", True),
    (OnBothSides, "first", "blocks", None),
    (OnBothSides, "last", "blocks", None),  # the forward that mentions it is overridden
    (MethodsDisagree, "last", "blocks", None),
    (MethodsDisagree, "first", "blocks", False),
    (Nested, "last", "blocks", True),
    (Nested, "first", "blocks", True),  # as if it were called behind all of them
    (Nested, "after", "last", True),
    (Nested, "scale", "after", False),
    (InOrder, "other", "blocks", None),
    (Step, "stem", "blocks", False),
    (Step, "head", "blocks", None),  # no method uses both
    (nn.Transformer, "encoder", "decoder", None),  # a library's own
])  # fmt: skip
def test_the_source_tells_or_does_not(kind: type[nn.Module], child: str, other: str, behind: bool | None) -> None:
    assert SourceOrder(kind()).is_behind(child, other) is behind


def test_code_without_source_tells_nothing() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        return self.b(self.a(x))", space)
    assert SourceOrder(space["Typed"]()).is_behind("b", "a") is None
