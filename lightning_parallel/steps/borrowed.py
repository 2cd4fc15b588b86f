"""Parameters and buffers that an evaluation step reads on a stage which doesn't hold them, as a recommender reads all
embeddings to rank all items. Their stage lends their values for a loop."""

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


class Borrowed:
    """The parameters and buffers that stages lend each other for a loop."""

    def __init__(self, run: Run, stage: Stage) -> None:
        self._run, self._stage = run, stage
        # By name, where this stage reads it, with the value that it has there; empty on other stages.
        self._lent: dict[str, list[tuple[dict[str, Any], str, Tensor]]] = {}

    def give_back(self) -> None:
        """End a loop: in the next one the values may be others."""
        self._lent.clear()

    @contextmanager
    def present(self, flow: Flow | None) -> Iterator[None]:
        """Inside, steps with this flow find the values on the module. All stages call it, in the same order."""
        with ExitStack() as put_back:
            for name, readers in flow.borrowed.items() if flow is not None else ():
                if name not in self._lent:
                    self._lent[name] = self._exchanged(name, readers)
                for store, key, value in self._lent[name]:
                    put_back.callback(store.__setitem__, key, store[key])
                    store[key] = value
            yield

    def _exchanged(self, name: str, readers: tuple[int, ...]) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Send the values to the stages that read them, or receive them there."""
        layout, holder = self._run.layout, self._stage.partition.holders_of(name)[0]
        if layout.stage not in (holder, *readers):
            return []
        path, _, key = name.rpartition(".")
        held, reads = getattr(self._run.module.get_submodule(path), key), layout.stage != holder
        value = torch.empty(held.shape, dtype=held.dtype, device=held.device) if reads else held.detach()
        group = self._run.groups.joining(layout.rank_at(pipeline=stage) for stage in {holder, *readers})
        broadcast_tensors([value], layout.rank_at(pipeline=holder), group)
        if not reads:
            return []
        given = nn.Parameter(value, requires_grad=False) if isinstance(held, nn.Parameter) else value
        stores = (store for part in self._run.module.modules() for store in (parameters_of(part), buffers_of(part)))
        return [(store, key, given) for store in stores for key, tensor in store.items() if tensor is held]
