"""The module in stages: which part of it a rank holds, and what that means for Lightning's set-up.

A rank's part is made before the module is moved to a device and before the optimizer exists; tied and loose parameters
are made equal on the stages that share them; checkpoints hold every stage's part under the whole model's names. How the
stages then work together is the subject of ``pipeline_base.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import checkpoint as checkpoints
from lightning_parallel.layout import Size
from lightning_parallel.pipeline.absent import AbsentTensor
from lightning_parallel.pipeline.partition import Balance, Partition, partition
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.strategies.checkpointing import StageCheckpoint


class StagedStrategy(LayoutStrategy):
    """A strategy under which every rank holds one stage of the module.

    Args:
        stages, layers, balance, activation_checkpointing: see :class:`~lightning_parallel.PipelineStrategy`.
        **kwargs: of :class:`~lightning_parallel.strategies.base.LayoutStrategy`.
    """

    def __init__(
        self,
        *,
        stages: Size,
        layers: Sequence[str] | None,
        balance: Balance,
        activation_checkpointing: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._stages = stages
        self._layers = list(layers) if layers is not None and not isinstance(layers, str) else layers
        self._balance = balance
        self._activation_checkpointing = activation_checkpointing
        self._stage: Stage | None = None
        self._parameters: dict[str, nn.Parameter] = {}  # held here, by original name
        self._shared: list[tuple[dist.ProcessGroup, list[str]]] = []  # what several stages hold, with their group
        self._group_names: list[list[str]] = []  # of the whole model, for each parameter group of the optimizer
        self._failed = False

    @override
    def axes(self) -> Mapping[str, Size]:
        return {"pipeline": self._stages}

    @property
    def stage(self) -> Stage:
        """This rank's stage, from set-up on."""
        assert self._stage is not None, "stages are made in Trainer.fit, validate, test and predict"
        return self._stage

    # -- set-up --------------------------------------------------------------------------------------------------

    @override
    def distribute_model(self, trainer: pl.Trainer) -> None:
        module = self._module()
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse(module)
        if self._stage is None or self._stage.module is not module:
            if any(isinstance(p, AbsentTensor) for p in module.parameters()):
                raise RuntimeError(
                    "This LightningModule holds one stage of a pipeline that another Trainer has made of it. Make a "
                    "new one, and load it from a checkpoint."
                )
            parts = partition(module, self.layout.pipeline, self._layers, self._balance)
            self.check_partition(parts)
            self._announce(parts, module)
            self._stage = Stage(module, parts, self.layout.stage, self.root_device)
        self.stage.install(recompute=bool(self._activation_checkpointing))

    def check_partition(self, parts: Partition) -> None:
        """Refuse what this schedule can't train."""

    def _announce(self, parts: Partition, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        for stage in range(parts.stages):
            names = [parts.layers[i] for i in parts.layers_of(stage)]
            outside = [name for name, owner in parts.outside.items() if owner == stage]
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} layers)"
            beside = f" with {', '.join(outside)}" if outside else ""
            size = sum(p.numel() for name, p in parameters.items() if stage in parts.owners[name])
            rank_zero_info(
                f"{self.layout.describe(self.layout.rank_of(stage=stage))}: {span}{beside}, {size:,} parameters"
                + self.describe_stage(stage)
            )

    def describe_stage(self, stage: int) -> str:
        """What the banner says of a stage beside its layers."""
        return ""

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._parameters = self.stage.named_parameters()
        self._join_shared_parameters()

    def _join_shared_parameters(self) -> None:
        """Tied and loose parameters: made equal on the stages that hold them. Kept, with their groups."""
        by_stages: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self.stage.partition.shared().items():
            by_stages.setdefault(stages, []).append(name)
        self._shared = []
        for stages, names in by_stages.items():
            for place in (self.layout.at(rank) for rank in range(self.layout.world_size)):
                if place.stage != stages[0]:
                    continue
                ranks = [place.rank_of(stage=stage) for stage in stages]
                group = dist.new_group(ranks, timeout=self._timeout)  # by all ranks, in the same order
                if self.layout.rank in ranks:
                    self._shared.append((group, names))
                    for name in names:
                        dist.broadcast(self._parameters[name].data, ranks[0], group)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """``configure_optimizers`` sees the whole model's parameters; then absent ones are dropped."""
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning advises manual optimization, which a pipeline can't run.
            raise ValueError(
                "configure_optimizers returned several optimizers: a pipeline runs the backward itself, for one. "
                "Return one optimizer, with parameter groups if need be."
            ) from error
        names = {id(parameter): name for name, parameter in self._module().named_parameters()}
        aliases = self.stage.partition.aliases
        self._group_names = []
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS needs products over the whole model, which a pipeline's stages don't have.")
            for group in optimizer.param_groups:
                listed = [aliases.get(names.get(id(p), ""), "") for p in group["params"]]
                self._group_names.append(list(dict.fromkeys(listed)))
                group["params"] = [p for p in group["params"] if not isinstance(p, AbsentTensor)]
            for parameter in list(optimizer.state):
                if isinstance(parameter, AbsentTensor):
                    del optimizer.state[parameter]

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # each stage reads its own part, so it has to know which that is

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False  # read together with the model

    def _checkpoint(self) -> StageCheckpoint:
        parameters = self.stage.named_parameters()
        model = {**{n: p.data for n, p in parameters.items()}, **self.stage.named_buffers()}
        return StageCheckpoint(model, parameters, self._group_names, self.layout.coordinate)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This stage's part; :meth:`save_checkpoint` joins the parts."""
        return {**self.stage.named_parameters(), **self.stage.named_buffers()}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # collected by name in save_checkpoint

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a directory with every stage's part. Called on all ranks."""
        if self._failed:
            rank_zero_warn(f"Not saved after an error: {filepath}. A checkpoint needs every stage.")
            return
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r}: a pipeline's checkpoint is a local directory.")
        self._checkpoint().save(checkpoint, filepath, self.optimizers)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this stage's part of a checkpoint: a directory made under any layout, or a plain file."""
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

    @override
    def teardown(self) -> None:
        if self._stage is not None:
            self._stage.remove()
        super().teardown()


def _refuse(module: pl.LightningModule) -> None:
    """What no pipeline can run."""
    if not module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False: a pipeline runs backward and step itself, by its schedule. Use automatic "
            "optimization."
        )
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__}.backward is overridden, but a pipeline's schedule runs the backward, stage by "
            f"stage. Remove the override; hooks such as on_after_backward are called as ever."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError("training_step(dataloader_iter): a pipeline splits batches, so it needs training_step(batch).")
