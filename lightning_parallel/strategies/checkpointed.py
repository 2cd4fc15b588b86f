"""Strategies whose ranks hold parts of the model: Lightning's checkpoint hooks, over one directory for all ranks.

A subclass says what its rank holds (:meth:`CheckpointedStrategy.held`). It is saved under the whole model's names, so
that a checkpoint says nothing of the layout that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import checkpoint as checkpoints
from lightning_parallel.data.copies import make_equal
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.strategies.checkpointing import RankCheckpoint
from lightning_parallel.tensor.shard import Shard


@dataclass(frozen=True)
class Held:
    """What a rank holds of the model.

    Attributes:
        parameters: by original name; tied ones once, under the first.
        buffers: those that belong into a checkpoint.
        shards: the parameters of which this is a shard.
        aliases: of every parameter of the whole model, tied names included, the name that it is held and saved under.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    shards: Mapping[str, Shard]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module, shards: Mapping[str, Shard] | None = None) -> Held:
        """All that is in ``module``, of which ``shards`` are shards."""
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        parameters = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases[name] = first.setdefault(id(parameter), name)
            if aliases[name] == name:
                parameters[name] = parameter
        persistent = module.state_dict(keep_vars=True)
        buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
        return cls(parameters, buffers, shards or {}, aliases)


class CheckpointedStrategy(LayoutStrategy):
    """Base of the strategies that divide the model.

    Args:
        **kwargs: of :class:`~lightning_parallel.strategies.base.LayoutStrategy`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._group_names: list[list[str]] = []  # of the whole model, for each parameter group of the optimizer
        self._failed = False

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._failed = False  # in a fit before

    def held(self) -> Held:
        """This rank's part, from :meth:`distribute_model` on."""
        raise TypeError(f"{type(self).__name__} is abstract: it holds nothing")

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning advises manual optimization.
            raise ValueError(_SEVERAL) from error
        if len(self.optimizers) > 1:
            raise ValueError(_SEVERAL)
        aliases = self.held().aliases
        names = {id(parameter): name for name, parameter in self._module().named_parameters()}
        self._group_names = []
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS needs products over the whole model, of which a rank holds a part only.")
            for group in optimizer.param_groups:
                listed = [aliases[names[id(p)]] for p in group["params"] if id(p) in names]
                self._group_names.append(list(dict.fromkeys(listed)))

    # -- buffers -------------------------------------------------------------------------------------------------

    def share_buffers(self) -> None:
        """What batches have left in the model (BatchNorm's statistics) differs between replicas: the first one's
        counts, wherever it is used or saved."""
        if not self._failed:
            make_equal(self.held().buffers.values(), self.layout.rank_of(data=0), self.groups.data)

    @override
    def on_validation_start(self) -> None:
        self.share_buffers()
        super().on_validation_start()

    @override
    def on_test_start(self) -> None:
        self.share_buffers()
        super().on_test_start()

    @override
    def on_predict_start(self) -> None:
        self.share_buffers()
        super().on_predict_start()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # each rank reads its own part, so it has to know which that is

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # read together with the model

    def _checkpoint(self) -> RankCheckpoint:
        held = self.held()
        model = {**{name: p.data for name, p in held.parameters.items()}, **held.buffers}
        return RankCheckpoint(model, held.parameters, held.shards, self._group_names, self.layout.coordinate)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part; :meth:`save_checkpoint` joins the parts."""
        self.share_buffers()  # all ranks save
        held = self.held()
        return {**held.parameters, **held.buffers}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # collected by name in save_checkpoint

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a directory with every rank's part. Called on all ranks."""
        if self._failed:
            rank_zero_warn(f"Not saved after an error: {filepath}. A checkpoint needs every rank.")
            return
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r}: this strategy's checkpoint is a local directory.")
        self._checkpoint().save(checkpoint, filepath, self.optimizers)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this rank's part of a checkpoint: a directory made under any layout, or a plain file."""
        optimizers = self.optimizers if self._module().trainer.state.fn == TrainerFn.FITTING else []
        trusted = weights_only is False
        part = self._checkpoint()
        if checkpoints.is_checkpoint(checkpoint_path):
            return part.load(checkpoint_path, optimizers, not trusted)
        return part.load_file(self.checkpoint_io, checkpoint_path, optimizers, not trusted)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done in load_checkpoint."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done in load_checkpoint."""

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self.is_global_zero:
            return
        if checkpoints.is_checkpoint(filepath):
            checkpoints.remove(filepath)
        else:
            self.checkpoint_io.remove_checkpoint(filepath)

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)


_SEVERAL = (
    "configure_optimizers returned several optimizers: a checkpoint can't keep their states apart, and a pipeline runs "
    "the backward itself, for one. Return one optimizer, with parameter groups if need be."
)
