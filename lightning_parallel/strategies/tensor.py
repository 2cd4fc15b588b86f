"""Tensor parallelism: every layer's matrices divided over the ranks, all of which work on each sample.

The user's ``training_step`` runs on every rank, on the same batch, and computes the same loss. The plan has replaced
the user's layers by ones that compute with shards and exchange sums (:mod:`lightning_parallel.tensor`). What is left to
do here: sum the partial gradients of whole parameters, take the norm over all shards, and save checkpoints::

    Lightning            here
    training_step        the user's step, in a region of equal random numbers
    backward             autograd, then gradients averaged over replicas and summed over shards
    clip, step           by the norm of the whole model

With manual optimization, every ``manual_backward`` completes the gradients that it adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_parallel.callbacks.start_table import Holding
from lightning_parallel.checks.manual import BackwardGuard
from lightning_parallel.gradients.loss_scale import share_overflows
from lightning_parallel.gradients.swapping import add_gradients, swap_gradients
from lightning_parallel.ranks.local_model import LocalModel
from lightning_parallel.set_up.options import ProcessOptions
from lightning_parallel.set_up.part_of_model import configure_part
from lightning_parallel.set_up.tensor_shards import TensorShards
from lightning_parallel.settings import Auto, Count, takes
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.tensor_plans.style import Plan


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions(ProcessOptions):
    """The settings of :class:`TensorParallelStrategy`.

    Args:
        tensor_parallel: the number of ranks that share a layer; ``"auto"``: all of them.
        plan: which layers are divided, and how: ``{"blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row", ...}``, see
            :mod:`lightning_parallel.tensor_plans.plan`. By default what the LightningModule's
            ``configure_tensor_parallel()`` returns, the plan that its transformers model brings along, or one found by
            trying. ``"none"``: nothing is divided, and each rank computes the same.
        sequence_parallel: between the divided layers, divide the activations too, along the sequence (Korthikanti et
            al. 2022): less memory, the same traffic.
        data_parallel: the number of replicas of the model, each of which gets its share of every batch; ``"auto"``: as
            many as there are ranks for, or one if the other axis is ``"auto"`` too.
    """

    tensor_parallel: Count | Auto = "auto"
    plan: Plan | Literal["none"] | None = None
    sequence_parallel: bool = False
    data_parallel: Count | Auto = "auto"


class TensorParallelStrategy(LayoutStrategy):
    """Layers divided over the ranks (Megatron-LM, Shoeybi et al. 2019), gradients those of the whole model.

    ::

        trainer = L.Trainer(devices=2, strategy=TensorParallelStrategy())
        trainer.fit(AnyLightningModule(), datamodule)

    Every rank sees the same batches. Elementwise optimizers (SGD, Adam, ...) step shards. One that mixes the entries of
    a matrix (Muon, LAMB) steps each whole parameter on one rank (:mod:`lightning_parallel.optimizers.owners`).
    """

    options: TensorParallelOptions

    @takes(TensorParallelOptions)
    def __init__(self, options: TensorParallelOptions) -> None:
        super().__init__(options, data=options.data_parallel, tensor=options.tensor_parallel)
        self._shards = TensorShards(options.plan, options.sequence_parallel, self.disk_offload)
        self._guard = BackwardGuard()

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        run = self.prepare(trainer)
        module = run.module
        self._shards.divide(run)
        configure_part(module)
        local = LocalModel.of(module, self._shards.shards)
        self.hold(local)
        share_overflows(run, self._at_end)
        self._shards.begin(run, local)
        if run.trains:
            self.replicas.begin(self._at_end, watch=True)
            by_hand = not module.automatic_optimization and self.layout.world_size > 1
            self._guard.begin(local.parameters.values() if by_hand else [], self._at_end)
        self.begin_averages()

    @property
    @override
    def holds_all(self) -> bool:
        # With replicas, states of generators would be of ranks when they are saved, and of replicas when they are read.
        return super().holds_all or (self.options.plan == "none" and self.layout.size("data") == 1)

    @override
    def counts(self, name: str) -> bool:
        return self._shards.counts(name)

    @override
    def holding(self) -> Holding:
        return Holding(f"all, {len(self._shards.shards)} parameters in shards")

    # -- a batch -------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output = super().training_step(*args, **kwargs)
        if not self.run.module.automatic_optimization:
            self._shards.end_step()
        return output

    @override
    def run_step(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        return self._shards.run(kind, super().run_step, kind, *args, **kwargs)

    @override
    def make_gradients(self, backward: Callable[[], None]) -> None:
        module, parameters = self.run.module, self.local_model.parameters
        earlier = swap_gradients(parameters, {})  # of batches or backwards before: complete already
        with self._guard.open(), self.collectives.inside_step("the backward"), self.replicas.completing():
            backward()
        own = self.replicas.averaged(swap_gradients(parameters, {}))
        manual = not module.automatic_optimization
        swap_gradients(parameters, self._shards.completed(own, more_follow=manual))
        add_gradients(parameters, earlier)
