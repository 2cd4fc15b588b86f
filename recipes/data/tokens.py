"""Windows of a long sequence of byte tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

Tokens = npt.NDArray[np.uint8]


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Pairs ``(tokens, targets)``, int64 [context] each, the target being the next token.

    Windows do not overlap, but for the one token that is the last target of one and the first token of the
    next.

    Args:
        tokens: uint8 [length], usually memory-mapped; length > context.
        context: tokens in a window.
        limit: at most so many windows, evenly spaced over the whole sequence; None: all of them.
    """

    def __init__(self, tokens: Tokens, context: int, limit: int | None = None) -> None:
        self.tokens = tokens
        self.context = context
        windows = (len(tokens) - 1) // context
        if windows < 1:
            raise ValueError(f"{len(tokens)} tokens hold no window of {context} and the token after it")
        self.count = min(windows, limit) if limit is not None else windows
        self.windows = windows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.windows // self.count * self.context
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]
