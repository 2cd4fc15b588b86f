"""The modules on which faults bite, and their batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS, LABELS = 16, 20, 4


class Block(nn.Module):
    """A residual block, with a dropout of rate ``p`` if it isn't 0."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(p) if p else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    @staticmethod
    def batches() -> list[Any]:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Blocks(Base):
    """A classifier of four residual blocks."""

    rate = 0.0
    plan = {"blocks.*.up": "column", "blocks.*.down": "row"}

    def build(self) -> None:
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(*(Block(self.rate) for _ in range(4)))
        self.head = nn.Linear(WIDTH, LABELS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.blocks(self.enter(batch[0]))), batch[1])
        self.log("loss", loss)
        return loss

    def configure_tensor_parallel(self) -> dict[str, str]:
        return self.plan

    @staticmethod
    def batches() -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        return [(torch.randn(8, 8, generator=generator), torch.arange(8) % LABELS) for _ in range(3)]


class Dropped(Blocks):
    """With dropout."""

    rate = 0.3


class Clipped(Blocks):
    """Clips its gradients by their norm."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Words(Base):
    """A language model with tied embeddings. Sentences have different numbers of labels that count."""

    plan = {
        "embed": "embedding",
        "blocks.*.q": "column",
        "blocks.*.k": "column",
        "blocks.*.v": "column",
        "blocks.*.o": "row",
        "blocks.*.up": "column",
        "blocks.*.down": "row",
    }

    def build(self) -> None:
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Attention(), Block(), Attention(), Block())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.embed(batch["words"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    @staticmethod
    def batches() -> list[Any]:
        generator = torch.Generator().manual_seed(4)
        found = []
        for _ in range(3):
            words = torch.randint(WORDS, (8, 6), generator=generator)
            labels = words.roll(-1, 1)
            labels[torch.arange(6) >= torch.tensor([6, 5, 6, 4, 2, 3, 5, 1]).unsqueeze(1)] = -100
            found.append({"words": words, "labels": labels})
        return found


class Untied(Words):
    """The same with two embeddings, for tensor ranks."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def configure_tensor_parallel(self) -> dict[str, str]:
        return self.plan


class Scale(nn.Module):
    """Works on what divided layers return, and is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Scaled(Blocks):
    """With a module between divided layers."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.up = nn.Sequential(block.get_submodule("up"), Scale())

    plan = {"blocks.*.up.0": "column", "blocks.*.up.1": "sum_gradient", "blocks.*.down": "row"}


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Pictures(Base):
    """Describes a picture: what the encoder sees is added to the words. The encoder's output crosses the cut."""

    def build(self) -> None:
        self.vision = Vision()
        self.words = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, LABELS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        seen, x = self.vision(batch[0].flip(1)), self.words(batch[0])
        for block in self.blocks:
            x = block(x + seen)
        return F.cross_entropy(self.head(x), batch[1])

    batches = staticmethod(Blocks.batches)


MODELS: dict[str, type[Base]] = {
    each.__name__: each for each in (Blocks, Dropped, Clipped, Words, Untied, Scaled, Pictures)
}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "stages": (2, "pipeline_1f1b", {"microbatches": 4}),
    "stages, all forwards first": (2, "pipeline_gpipe", {"microbatches": 4}),
    "stages in a V": (2, "pipeline_zbv", {"microbatches": 4}),
    "interleaved stages": (2, "pipeline_interleaved", {"microbatches": 4}),
    "late stages": (2, "pipeline_async", {"microbatches": 4}),
    "replicas": (2, "pipeline_1f1b", {"stages": 1, "data_parallel": 2, "microbatches": 2}),
    "stages x replicas": (4, "pipeline_1f1b", {"data_parallel": 2, "microbatches": 2}),
    "fully sharded": (2, "fully_sharded", {}),
    "tensor": (2, "tensor_parallel", {}),
    "stages x tensor": (4, "pipeline_1f1b", {"tensor_parallel": 2, "microbatches": 2}),
}
