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
    """What this rank's stage borrows."""

    def __init__(self, run: Run, stage: Stage) -> None:
        self._run, self._stage = run, stage
        self._lent: dict[str, Tensor | None] = {}  # in this loop, by name; None if this stage doesn't read it

    def end(self) -> None:
        """Give everything back: in the next loop the values may be others."""
        self._lent.clear()

    @contextmanager
    def present(self, flow: Flow | None) -> Iterator[None]:
        """Inside, steps with this flow find the values on the module. All stages call it, in the same order."""
        module = self._run.module
        with ExitStack() as put_back:
            for name, readers in flow.borrowed if flow is not None else ():
                path, _, key = name.rpartition(".")
                held = getattr(module.get_submodule(path), key)
                if name not in self._lent:
                    self._lent[name] = self._exchanged(held, name, readers)
                if (value := self._lent[name]) is not None:
                    given = nn.Parameter(value, requires_grad=False) if isinstance(held, nn.Parameter) else value
                    for store in _stores_with(held, module):
                        for key in [key for key, tensor in store.items() if tensor is held]:
                            store[key] = given
                            put_back.callback(store.__setitem__, key, held)
            yield

    def _exchanged(self, held: Tensor, name: str, readers: tuple[int, ...]) -> Tensor | None:
        """Send the values to the stages that read them, or receive them there."""
        layout, holder = self._run.layout, self._stage.partition.holders_of(name)[0]
        if layout.stage not in (holder, *readers):
            return None
        reads = layout.stage != holder
        value = torch.empty(held.shape, dtype=held.dtype, device=held.device) if reads else held.detach().clone()
        group = self._run.groups.joining(layout.rank_at(pipeline=stage) for stage in {holder, *readers})
        broadcast_tensors([value], layout.rank_at(pipeline=holder), group)
        return value if reads else None


def _stores_with(held: Tensor, module: nn.Module) -> Iterator[dict[str, Any]]:
    """The dictionaries of parameters and buffers in which a tensor is, under any name."""
    for part in module.modules():
        for store in (parameters_of(part), buffers_of(part)):
            if any(tensor is held for tensor in store.values()):
                yield store
