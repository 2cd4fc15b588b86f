"""The module in stages: which part of it a rank holds, and what that means for Lightning's set-up.

A rank's part is made before the module is moved to a device and before the optimizer exists; tied and loose parameters
are made equal on the stages that share them; checkpoints hold every stage's part under the whole model's names. How the
stages then work together is the subject of ``pipeline_base.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_parallel.data.copies import make_equal
from lightning_parallel.data.fully_sharded import ShardedLayers
from lightning_parallel.data.units import untied
from lightning_parallel.layout import Size
from lightning_parallel.pipeline.absent import AbsentTensor
from lightning_parallel.pipeline.balance import Balance
from lightning_parallel.pipeline.partition import Partition, partition
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.strategies.checkpointed import Held
from lightning_parallel.strategies.sharded import ShardedStrategy

DataParallelKind = Literal["replicate", "shard"]


class StagedStrategy(ShardedStrategy):
    """A strategy under which every rank holds one stage of the module.

    Args:
        stages, layers, balance, activation_checkpointing, data_parallel_kind: see
            :class:`~lightning_parallel.PipelineStrategy`.
        **kwargs: of :class:`~lightning_parallel.strategies.sharded.ShardedStrategy`.
    """

    def __init__(
        self,
        *,
        stages: Size,
        layers: Sequence[str] | None,
        balance: Balance,
        activation_checkpointing: bool,
        data_parallel_kind: DataParallelKind,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if data_parallel_kind not in get_args(DataParallelKind):
            kinds = " or ".join(map(repr, get_args(DataParallelKind)))
            raise ValueError(f"data_parallel_kind={data_parallel_kind!r}: choose {kinds}.")
        if data_parallel_kind == "shard" and self._tensor_parallel != 1:
            raise ValueError(
                f"data_parallel_kind='shard' with tensor_parallel={self._tensor_parallel!r}: shards of shards aren't "
                f"supported. Use data_parallel_kind='replicate', or tensor_parallel=1."
            )
        self._data_parallel_kind = data_parallel_kind
        self._sharded_layers: ShardedLayers | None = None
        self._stages = stages
        self._layers = list(layers) if layers is not None and not isinstance(layers, str) else layers
        self._balance = balance
        self._activation_checkpointing = activation_checkpointing
        self._stage: Stage | None = None
        self._parameters: dict[str, nn.Parameter] = {}  # held here, by original name
        self._shared: list[tuple[dist.ProcessGroup, list[str]]] = []  # what several stages hold, with their group

    @override
    def axes(self) -> Mapping[str, Size]:
        return {"pipeline": self._stages, **super().axes()}

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
            _refuse_training(module)
        _refuse_evaluation(module)
        if self._stage is None or self._stage.module is not module:
            if any(isinstance(p, AbsentTensor) for p in module.parameters()):
                raise RuntimeError(
                    "This LightningModule holds one stage of a pipeline that another Trainer has made of it. Make a "
                    "new one, and load it from a checkpoint."
                )
            parts = partition(module, self.layout.pipeline, self._layers, self._balance)
            self.check_partition(parts)
            self._announce(parts, module)
            self.shard(module)  # behind the partition, which weighs whole layers, and before the others' are dropped
            self._stage = Stage(module, parts, self.layout.stage, self.root_device)
            self._sharded_layers = self._shard_over_replicas()
        self.stage.install(recompute=bool(self._activation_checkpointing))

    def _shard_over_replicas(self) -> ShardedLayers | None:
        """Before the stage's hooks are there: behind its last layer they leave, and torch's have to run by then."""
        if self._data_parallel_kind == "replicate" or self.layout.data == 1:
            return None
        layers = untied(self._module(), self.stage.layers())
        return ShardedLayers(layers, self.groups.data, self.root_device)

    @override
    def before_last_backward(self) -> None:
        super().before_last_backward()
        if self._sharded_layers is not None and self._ends_update:
            self._sharded_layers.release()

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
                    make_equal((self._parameters[name] for name in names), ranks[0], group)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """``configure_optimizers`` sees the whole model's parameters; then absent ones are dropped."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if not isinstance(p, AbsentTensor)]
            for parameter in list(optimizer.state):
                if isinstance(parameter, AbsentTensor):
                    del optimizer.state[parameter]

    @override
    def held(self) -> Held:
        stage, shards = self.stage, self._sharding.shards
        return Held(stage.named_parameters(), stage.named_buffers(), shards, stage.partition.aliases)

    # -- the end -------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        if self._stage is not None:
            self._stage.remove()
        super().teardown()


def _refuse_training(module: pl.LightningModule) -> None:
    """What no pipeline can train."""
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


def _refuse_evaluation(module: pl.LightningModule) -> None:
    """What no pipeline can run."""
    for step in (module.validation_step, module.test_step, module.predict_step):
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ValueError(
                f"{step.__name__}(dataloader_iter): a pipeline looks through a step before it runs it, so the first "
                f"batch would be lost. Take {step.__name__}(batch, batch_idx)."
            )
