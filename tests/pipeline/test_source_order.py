"""What a module plainly calls after others, as its source has it."""

from __future__ import annotations

from functools import reduce
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

from lightning_parallel.pipeline.source_order import SourceOrder


class Plain(nn.Module):
    head: Any
    blocks: Any
    stem: Any

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks[:9]):
            x = block(x, i)
        if self.head is not None:
            x = self.head(x)
        return x


class Nested(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).relu())


class InComprehensions(Plain):
    def forward(self, x: Tensor) -> Tensor:
        outputs = [block(x) for block in self.blocks]
        return sum(self.head(output) for output in outputs)


class OfAStep(Plain):
    def training_step(this, batch: Any, batch_idx: int) -> Tensor:
        hidden = this.blocks(this.stem(batch), mask=None)
        return this.head(hidden).sum()


@pytest.mark.parametrize("kind", [Plain, Nested, InComprehensions, OfAStep])
def test_what_is_called_after_is_told(kind: type[nn.Module]) -> None:
    order = SourceOrder(kind())
    assert order.is_after("head", "blocks")
    assert not order.is_after("stem", "blocks") and not order.is_after("blocks", "head")


class Elsewhere(L.LightningModule):
    """Each method uses a part only, or none of the step's."""

    head: Any
    blocks: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self(batch)).sum()

    def configure_optimizers(self) -> Any:
        return [self.blocks(None), self.head(None)]


class InTheLoop(Plain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.head(block(x))
        return x


class InAComprehension(Plain):
    def forward(self, x: Tensor) -> Any:
        return {i: self.head(x := block(x)) for i, block in enumerate(self.blocks)}


class BeforeToo(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.blocks(x) + self.head(x)


class ReceiverFirst(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).mul(self.blocks(x))


class Alias(Plain):
    def forward(self, x: Tensor) -> Tensor:
        blocks = self.blocks
        x = self.head(x)
        for block in blocks:
            x = block(x)
        return x


class Passed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return reduce(lambda hidden, block: block(hidden), self.blocks, self.head(x))


class Later(Plain):
    def forward(self, x: Tensor) -> Tensor:
        run = lambda x: self.blocks(x)  # noqa: E731
        x = self.head(x)
        return run(x)


class MethodsDisagree(Nested):
    def training_step(self, batch: Any) -> Tensor:
        return self.blocks(self.head(batch))


class LoopsWithoutCalling(Plain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.reset()
        x = self.head(x)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ByAMethodToo(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.blocks[0](x)) if x.is_cpu else self.blocks(x)

    def embed(self, x: Tensor) -> Tensor:
        return self.head(x)


class CallsItself(Plain):
    def training_step(self, batch: Any) -> Tensor:
        x = self(batch)
        return self.head(self.blocks(x))

    forward = None


class OtherwiseToo(Plain):
    def forward(self, x: Tensor) -> Tensor:
        first = self.head
        return self.head(self.blocks(first(x)))


class InASubscript(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head[self.blocks(x)](self.head[0](x))


class AGenerator(Plain):
    def forward(self, x: Tensor) -> Tensor:
        later = (block(x) for block in self.blocks)
        x = self.head(x)
        return sum(later, x)


class ALambda(Plain):
    forward = lambda self, x: self.head(self.blocks(x))  # noqa: E731


@pytest.mark.parametrize("kind", [
    Elsewhere, InTheLoop, InAComprehension, BeforeToo, ReceiverFirst, Alias, Passed, Later, MethodsDisagree, ALambda,
    LoopsWithoutCalling, ByAMethodToo, CallsItself, OtherwiseToo, InASubscript, AGenerator,
])  # fmt: skip
def test_what_may_be_called_otherwise_is_not(kind: type[nn.Module]) -> None:
    assert not SourceOrder(kind()).is_after("head", "blocks")


def test_code_without_source_tells_nothing() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        return self.b(self.a(x))", space)
    assert not SourceOrder(space["Typed"]()).is_after("b", "a")
