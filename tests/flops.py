"""torch's counter of FLOPs, with the formula that it lacks: of attention on a CPU."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, bmm_flop

from lightning_parallel.private.torch.tensors import ATTENTION_ON_CPU


def flop_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={ATTENTION_ON_CPU: _attention})


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    """Written out as two products of matrices; with fewer heads of keys, each is used several times."""
    batch, heads, queries, width = query
    scores = bmm_flop((batch * heads, queries, width), (batch * heads, width, key[2]))
    return int(scores + bmm_flop((batch * heads, queries, key[2]), (batch * heads, *value[2:])))
