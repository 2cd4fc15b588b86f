"""A GPT that learns the bytes of source files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from recipes import ROOT
from recipes.data import sources
from recipes.data.sources import Sources
from recipes.data.text import TokenWindows
from recipes.models.gpt import GPT
from tools.study.arms import Setting
from tools.study.task import Chain, Split, Words


def headers() -> Sources:
    """The ``.h`` files that torch brings, its own and its libraries', without those generated for each operator: about
    24 MB."""
    return Sources("headers", Path(torch.__file__).parent / "include", ".h", frozenset({"ATen/ops"}))


class _Embeddings(nn.Module):
    """[batch, time] of tokens -> [batch, time, width]."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token_embedding = model.token_embedding
        self.position_embedding = model.position_embedding

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token_embedding(tokens) + self.position_embedding(positions)


@dataclass(frozen=True)
class Text:
    """The task of guessing the next byte.

    Attributes:
        sources: makes the text.
        described: the text, in the page's words.
        made: folder of a text in the form of :mod:`recipes.data.sources`, in the place of the one that they make.
    """

    sources: Callable[[], Sources]
    described: str
    made: Path | None = None

    @property
    def words(self) -> Words:
        return Words(
            model=f"`recipes.models.gpt.GPT` on the bytes of {self.described}",
            samples="windows",
            drawn="Windows are drawn at random",
            held_out="evenly spaced over the held-out files",
            apart="of other files than those of the validation",
            unit="nats a byte",
            limits="short contexts, one text",
        )

    def fingerprint(self) -> str:
        return self.sources().fingerprint(self._folder())

    def chain(self, setting: Setting) -> Chain:
        s = setting
        model = GPT(optimizer={}, context=s.context, layers=s.layers, width=s.width, heads=s.heads)
        return Chain(_Embeddings(model), list(model.blocks), nn.Sequential(model.norm, model.head))

    def batches(self, setting: Setting, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows at random places of the text: inputs and targets, [batch, context] each."""
        tokens = torch.from_numpy(np.array(sources.tokens(self._folder(), "train")))
        generator = torch.Generator().manual_seed(seed)
        places = torch.arange(setting.context + 1)
        for _ in range(setting.updates):
            starts = torch.randint(len(tokens) - setting.context, (setting.batch, 1), generator=generator)
            windows = tokens[starts + places].long()
            yield windows[:, :-1], windows[:, 1:]

    def held_out(self, setting: Setting, split: Split, count: int) -> tuple[Tensor, Tensor]:
        """Windows, evenly spaced: inputs and targets, [count, context] each."""
        found = TokenWindows(sources.tokens(self._folder(), split), setting.context, count)
        inputs, targets = zip(*map(found.__getitem__, range(len(found))), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def _folder(self) -> Path:
        return self.made if self.made is not None else self.sources().build(ROOT / "data")
