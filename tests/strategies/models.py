"""LightningModules as users write them, none with a thought of pipelines, and small batches for them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos import Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 22  # not a multiple of the batch size of 8: the last batch has 6
BATCH = 8
TOKENS = 33
LENGTH = 12


class Rows(Dataset[Any]):
    """A list of samples that is the same wherever it is made."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Base(L.LightningModule):
    """Seeded weights, AdamW with a schedule, seeded data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.build()

    def build(self) -> None:
        raise TypeError("a model builds its layers here")

    def loss(self, batch: Any) -> Tensor:
        raise TypeError("a model computes its loss here")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)  # eps: or Adam would blow up rounding
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @classmethod
    def samples(cls) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=generator)
        return [{"input_ids": row, "labels": row} for row in tokens]

    @classmethod
    def loader(
        cls, shuffle: bool = False, batch_size: int = BATCH, samples: int = SAMPLES, share: Any = None
    ) -> DataLoader[Any]:
        """``share``: which replica's samples, as DistributedSampler's arguments (Lightning's own would be shuffled)."""
        rows = Rows(cls.samples()[:samples])
        if share is None:
            return DataLoader(rows, batch_size=batch_size, shuffle=shuffle)
        return DataLoader(rows, batch_size=batch_size, sampler=DistributedSampler(rows, **share, shuffle=shuffle))


def next_token_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """transformers' own, less its cast to float32, which would bound every comparison."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


class OfTransformers(Base):
    """A language model of transformers, small, with its own loss."""

    kind = "LlamaForCausalLM"
    sizes: dict[str, Any] = {}

    def build(self) -> None:
        import transformers

        model = getattr(transformers, self.kind)
        self.model = model(model.config_class(vocab_size=TOKENS, bos_token_id=0, eos_token_id=0, **self.sizes))
        self.model.loss_function = next_token_loss

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


class GPT2(OfTransformers):
    """Embedding and head are tied as they come."""

    kind = "GPT2LMHeadModel"
    sizes = {
        "n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 16, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
    }  # fmt: skip


class GPT2Untied(GPT2):
    sizes = GPT2.sizes | {"tie_word_embeddings": False}


class Llama(OfTransformers):
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 16,
    }  # fmt: skip


class DemoTransformer(Base):
    """Lightning's own demo model, whose layers are inside torch's nn.TransformerDecoder... and its forward as it is."""

    def build(self) -> None:
        self.model = Transformer(vocab_size=TOKENS, ninp=16, nhead=2, nhid=24, nlayers=4, dropout=0.0)

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        output = self.model(inputs, target)
        return F.nll_loss(output, target.view(-1))

    @classmethod
    def samples(cls) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, TOKENS, (SAMPLES, LENGTH + 1), generator=generator)
        return [(row[:-1], row[1:]) for row in tokens]


class LeNet(Base):
    """Convolutions, pooling and Flatten in one nn.Sequential; in-place activations."""

    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 10),
        )  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    @classmethod
    def samples(cls) -> list[Any]:
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
        labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
        return list(zip(images, labels, strict=True))


class Gate(nn.Module):
    """A block with a scale of its own, taking and returning two values, the mask by keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, state: Tensor, total: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        out = state + self.scale * torch.tanh(self.mix(self.norm(state))) * mask
        return out, total + out.pow(2).mean(dim=(1, 2))


class Blocks(Base):
    """A ModuleList in the LightningModule itself; a loose position parameter, one unused and one frozen parameter; two
    values handed from block to block; a mask by keyword; recurrence; glue between the layers."""

    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, 16)
        self.position = nn.Parameter(torch.randn(LENGTH, 16) * 0.1)
        self.unused = nn.Parameter(torch.ones(3))
        self.temperature = nn.Parameter(torch.ones(()))  # used after the last block
        self.blocks = nn.ModuleList(Gate(16) for _ in range(5))
        self.blocks[1].mix.weight.requires_grad_(False)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, TOKENS, bias=False)

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"]
        state = self.embed(tokens) + self.position[: tokens.shape[1]]
        total = torch.zeros(tokens.shape[0], dtype=state.dtype, device=state.device)
        mask = (tokens > 3).unsqueeze(-1).to(state.dtype)
        for block in self.blocks:
            state, total = block(state, total, mask=mask)
            state = state * 0.9
        state, _ = self.recurrent(state)
        logits = self.head(state) / self.temperature
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0.01 * total.mean()

    @classmethod
    def samples(cls) -> list[Any]:
        rows = super().samples()
        return [{**row, "name": f"sample {i}"} for i, row in enumerate(rows)]


class SharedPart(Blocks):
    """One layer in two blocks, far from each other."""

    def build(self) -> None:
        super().build()
        self.blocks[4].mix = self.blocks[0].mix


class Shift(nn.Linear):
    """For one sample, autograd takes one memory for the gradients of the product and of both shifts: nothing is summed.
    A backward in halves keeps the first one for the weight, while the next microbatch adds to the others."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.low, self.high = (nn.Parameter(torch.randn(LENGTH, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) + self.low[None] + self.high[None]).sin()


class Shifts(Base):
    def build(self) -> None:
        self.embed = nn.Embedding(TOKENS, 16)
        self.shifts = nn.Sequential(*(Shift() for _ in range(4)))
        self.head = nn.Linear(16, TOKENS)

    def loss(self, batch: Any) -> Tensor:
        x = self.shifts(self.embed(batch["input_ids"]))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class Deep(LeNet):
    """Chunks for five stages."""

    def build(self) -> None:
        sizes = [64, *[12] * 9, 10]
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.net = nn.Sequential(nn.Flatten(), *layers)


class Skips(LeNet):
    """The first layers' outputs go to the last ones, as in a U-Net; the stage that has both keeps one in reach."""

    def build(self) -> None:
        self.inner = nn.ModuleList(nn.Linear(64 if i == 0 else 12, 12) for i in range(4))
        self.outer = nn.ModuleList(nn.Linear(24, 12) for _ in range(3))
        self.head = nn.Linear(12, 10)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        x, kept = images.flatten(1), []
        for layer in self.inner:
            x = layer(x).tanh()
            kept.append(x)
        for layer, skip in zip(self.outer, reversed(kept[:-1]), strict=True):
            x = layer(torch.cat([x, skip], 1)).tanh()
        return F.cross_entropy(self.head(x), labels)


_MODELS = (GPT2, GPT2Untied, Llama, DemoTransformer, LeNet, Blocks, SharedPart, Shifts)
MODELS = {model.__name__: model for model in _MODELS}
