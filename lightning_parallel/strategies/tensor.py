"""Tensor parallelism: every layer's matrices divided over the ranks, all of which work on each sample.

The user's ``training_step`` runs on every rank, on the same batch, and comes to the same loss; what is divided, and
where the ranks exchange sums, is the business of the layers that the plan has put in place of the user's
(:mod:`lightning_parallel.tensor`). So there is little left to do here: gradients of what is whole, the norm of what is
not, and checkpoints.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.layout import Size
from lightning_parallel.pipeline.weights import add_gradients, swap_gradients
from lightning_parallel.strategies.checkpointed import Held
from lightning_parallel.strategies.sharded import ShardedStrategy
from lightning_parallel.tensor.plan import Plan


class TensorParallelStrategy(ShardedStrategy):
    """Layers in shards over the ranks (Megatron-LM, Shoeybi et al. 2019), gradients those of the whole model.

    ::

        trainer = L.Trainer(devices=2, strategy=TensorParallelStrategy())
        trainer.fit(AnyLightningModule(), datamodule)

    Every rank sees the same batches. Optimizers work on shards: elementwise ones (SGD, Adam, ...) as on the whole
    parameters; one that mixes the entries of a matrix (Muon, LAMB) takes each shard for a matrix of its own.

    Args:
        tensor_parallel: ranks that share a layer; ``"auto"``: all of them.
        plan: which layers, and how: ``{"blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row", ...}``, see
            :mod:`lightning_parallel.tensor.plan`. By default what the LightningModule's ``configure_tensor_parallel()``
            returns, or the plan that its transformers model brings along.
        sequence_parallel: between the layers that are divided, activations are divided too, along the sequence
            (Korthikanti et al. 2022): less memory, the same traffic.
        data_parallel: replicas of the model, each with its share of every batch; ``"auto"``: as many as there are
            ranks for.
        **kwargs: of :class:`~lightning_parallel.strategies.base.LayoutStrategy`.
    """

    def __init__(
        self,
        *,
        tensor_parallel: Size = "auto",
        plan: Plan | None = None,
        sequence_parallel: bool = False,
        data_parallel: Size = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            tensor_parallel=tensor_parallel,
            plan=plan,
            sequence_parallel=sequence_parallel,
            data_parallel=data_parallel,
            **kwargs,
        )
        self._held: Held | None = None

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def distribute_model(self, trainer: pl.Trainer) -> None:
        self.shard(self._module())
        self._held = Held.of(self._module(), self._sharding.shards)

    @override
    def held(self) -> Held:
        assert self._held is not None, "the model is divided in Trainer.fit, validate, test and predict"
        return self._held

    # -- training ------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._unchecked:
            self.check_same_batch((*args, *kwargs.values())[0])
        with self.sharded_region():
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As Lightning's, with an update's gradients completed before any hook sees them."""
        module, parameters = self._module(), self.held().parameters
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Optimizing by hand, a user may step after any backward: each completes what it adds.
        by_hand = not module.automatic_optimization
        earlier = swap_gradients(parameters, {}) if by_hand else {}
        self._ends_update |= by_hand
        self.before_last_backward()
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self._ends_update:
            swap_gradients(parameters, self.complete_gradients(swap_gradients(parameters, {})))
        add_gradients(parameters, earlier)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss
