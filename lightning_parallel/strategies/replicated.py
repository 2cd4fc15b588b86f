"""What every strategy with a data axis shares: replicas that start equal, and average their gradients once an update.

A replica sees its share of the samples (the sampler's business, see ``base.py``), and its gradients are those of its
own batch until the backward that completes an update's; then they are averaged, bucket by bucket, while that backward
goes on (:mod:`lightning_parallel.data.averaging`). Batches that only accumulate send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.data.averaging import GradientAverager
from lightning_parallel.data.copies import make_equal
from lightning_parallel.layout import Size
from lightning_parallel.strategies.checkpointed import CheckpointedStrategy


class ReplicatedStrategy(CheckpointedStrategy):
    """A strategy whose ranks may hold replicas of what others hold.

    Args:
        data_parallel: replicas of the model, each with its share of every batch; ``"auto"``: as many as the other axes
            leave room for.
        **kwargs: of :class:`~lightning_parallel.strategies.base.LayoutStrategy`.
    """

    def __init__(self, *, data_parallel: Size, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._data_parallel = data_parallel
        self._averager: GradientAverager | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._ends_update = False  # does an update come after the batch at hand?
        self._accumulated = False  # do gradients of earlier batches wait for that update?

    @override
    def axes(self) -> Mapping[str, Size]:
        return {"data": self._data_parallel}

    # -- replicas that are equal ---------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._ends_update, self._accumulated = False, False
        self.make_copies_equal()
        if self.layout.data > 1 and trainer.state.fn == TrainerFn.FITTING:
            self._averager = GradientAverager(_whole(self.held().parameters), self.groups.data)
            self._hooks = self.watch_gradients(self._averager.ready)

    def make_copies_equal(self) -> None:
        """Parameters and buffers as the first replica has them: user's scripts need not seed their weights."""
        held = self.held()
        copies = (*_whole(held.parameters).values(), *held.buffers.values())
        make_equal(copies, self.layout.rank_of(data=0), self.groups.data)

    # -- gradients -----------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self._ends_update = True  # of the batch that the closure runs
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._ends_update, self._accumulated = False, False

    def watch_gradients(self, ready: Callable[[str, Tensor], None]) -> list[torch.utils.hooks.RemovableHandle]:
        """Have ``ready`` called whenever a parameter's gradient has grown."""

        def grown(name: str, parameter: Tensor) -> None:
            assert parameter.grad is not None
            ready(name, parameter.grad)

        return [
            parameter.register_post_accumulate_grad_hook(partial(grown, name))
            for name, parameter in _whole(self.held().parameters).items()
            if parameter.requires_grad
        ]

    def before_last_backward(self) -> None:
        """Of an update: gradients that it completes are averaged from here on, while it runs."""
        if self._averager is not None and self._ends_update:
            self._averager.begin()

    def averaged_gradients(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The mean of an update's gradients over the replicas, which all call it."""
        averages = {} if self._averager is None else self._averager.finish(gradients)
        return {**gradients, **averages}  # those of shards come as averages

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._averager = [], None
        super().teardown()


def _whole(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those that every replica holds whole, rather than in shards of torch's."""
    return {name: parameter for name, parameter in parameters.items() if not isinstance(parameter, DTensor)}
