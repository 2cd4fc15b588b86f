"""Parameters and buffers that an evaluation step reads on a stage which doesn't hold them, as a recommender reads all
embeddings to rank all items. Their stage lends their values for each batch, since hooks may change them in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.plan.flow import Flow
from lightning_parallel.private.torch import buffers_of, parameters_of
from lightning_parallel.ranks.collectives import broadcast_tensors
from lightning_parallel.ranks.run import Run


@contextmanager
def borrowed(flow: Flow | None, run: Run, stage: Stage) -> Iterator[None]:
    """Inside, an evaluation step with this flow finds the values on the module. All stages call it."""
    with ExitStack() as put_back:
        for name, readers in flow.borrowed.items() if flow is not None else ():
            for store, key, value in _exchanged(name, readers, run, stage):
                put_back.callback(store.__setitem__, key, store[key])
                store[key] = value
        yield


def _exchanged(name: str, readers: tuple[int, ...], run: Run, stage: Stage) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Send the values to the stages that read them, or receive them there: with their places on this module."""
    layout, holder = run.layout, stage.partition.holders_of(name)[0]
    if layout.stage not in (holder, *readers):
        return []
    path, _, key = name.rpartition(".")
    held, reads = getattr(run.module.get_submodule(path), key), layout.stage != holder
    value = torch.empty(held.shape, dtype=held.dtype, device=held.device) if reads else held.detach()
    group = run.groups.joining(layout.rank_at(pipeline=each) for each in {holder, *readers})
    broadcast_tensors([value], layout.rank_at(pipeline=holder), group)
    if not reads:
        return []
    given = nn.Parameter(value, requires_grad=False) if isinstance(held, nn.Parameter) else value
    stores = (store for part in run.module.modules() for store in (parameters_of(part), buffers_of(part)))
    return [(store, key, given) for store in stores for key, tensor in store.items() if tensor is held]
