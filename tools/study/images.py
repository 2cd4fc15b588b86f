"""A residual network of perceptrons that learns scikit-learn's digits, shifted and under noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from recipes.data.digits import DigitsData
from tools.study.arms import Setting
from tools.study.task import Chain, Split, Words

_SIDE, _CLASSES = 8, 10
_SEEDS = {"val": 1, "test": 2}  # of what is done to held-out digits


class _Block(nn.Module):
    """A two-layer perceptron after a LayerNorm, added to its input: [batch, width] -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


@dataclass(frozen=True)
class Digits:
    """The task of telling digits apart, each anew at every look.

    Attributes:
        shift: pixels, at most, by which a digit is moved along each side; zeros come in.
        noise: standard deviation of what is added to each pixel, which is between 0 and 1.
    """

    shift: int
    noise: float

    @property
    def words(self) -> Words:
        return Words(
            model="A residual network, whose blocks are a LayerNorm and a perceptron with a hidden layer four times as "
            f"wide, on the 64 pixels of scikit-learn's digits, moved by up to {self.shift} along each side, with noise "
            f"of deviation {self.noise:g} on pixels between 0 and 1 (`tools.study.images`)",
            samples="images",
            drawn="Digits, and what is done to them, are drawn at random",
            held_out="of 180 held-out digits",
            apart="of other digits than those of the validation",
            unit="nats an image",
            limits="8 x 8 images",
            unused=frozenset({"heads", "context"}),
        )

    def fingerprint(self) -> str:
        return f"{_digits().fingerprint} shift {self.shift} noise {self.noise:g}"

    def chain(self, setting: Setting) -> Chain:
        before = nn.Sequential(nn.Flatten(), nn.Linear(_SIDE**2, setting.width))
        blocks = [_Block(setting.width) for _ in range(setting.layers)]
        after = nn.Sequential(nn.LayerNorm(setting.width), nn.Linear(setting.width, _CLASSES))
        return Chain(before, blocks, after)

    def batches(self, setting: Setting, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images [batch, 1, 8, 8] and their digits [batch]."""
        images, digits = _tensors(_digits().train_set)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(setting.updates):
            places = torch.randint(len(digits), (setting.batch,), generator=generator)
            yield self._changed(images[places], generator), digits[places]

    def held_out(self, setting: Setting, split: Split, count: int) -> tuple[Tensor, Tensor]:
        """Images [count, 1, 8, 8], of each held-out digit as many as of the next, and their digits [count]."""
        data = _digits()
        images, digits = _tensors(data.val_set if split == "val" else data.test_set)
        places = torch.arange(count) % len(digits)
        return self._changed(images[places], torch.Generator().manual_seed(_SEEDS[split])), digits[places]

    def _changed(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Moved, and with noise."""
        padded = F.pad(images, [self.shift] * 4)
        starts = torch.randint(2 * self.shift + 1, (2, len(images), 1, 1), generator=generator)
        side = torch.arange(_SIDE)
        moved = padded[torch.arange(len(images))[:, None, None], 0, starts[0] + side[:, None], starts[1] + side]
        return (moved + self.noise * torch.randn(moved.shape, generator=generator)).unsqueeze(1)


def _digits() -> DigitsData:
    data = DigitsData()
    data.setup("fit")
    return data


def _tensors(data: Dataset[Any]) -> tuple[Tensor, ...]:
    assert isinstance(data, TensorDataset)
    return data.tensors
