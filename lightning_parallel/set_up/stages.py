"""The module in stages: the part of it that this rank holds, and what several stages hold together.

A rank's part is taken before the module is moved to a device, and before the optimizer exists. Parameters that several
stages hold, tied and loose ones, are made equal on them.
"""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_parallel.cuts.partition import Partition
from lightning_parallel.fully_sharded.layers import FullyShardedLayers
from lightning_parallel.fully_sharded.units import untied
from lightning_parallel.gradients.averaging import summed_over
from lightning_parallel.gradients.swapping import Gradients
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.private.torch.modules import is_graphed
from lightning_parallel.ranks.collectives import broadcast_tensors, gather_objects
from lightning_parallel.ranks.local_model import LocalModel, local_part
from lightning_parallel.ranks.run import Run
from lightning_parallel.set_up.options import StagedOptions
from lightning_parallel.set_up.part_of_model import attributes_kept, configure_part


class Stages:
    """This rank's stage of a module, and what it shares with other stages. ``fully_sharded`` are the stage's layers if
    they are sharded over the replicas; None otherwise."""

    def __init__(self, options: StagedOptions) -> None:
        self.fully_sharded: FullyShardedLayers | None = None
        self._options = options
        self._stage: Stage | None = None
        # Of stages that share parameters: their group, the group of their hosts, and the parameters.
        self._shared: list[tuple[dist.ProcessGroup, dist.ProcessGroup, dict[str, nn.Parameter]]] = []

    @property
    def stage(self) -> Stage:
        """This rank's stage; known from set-up on."""
        assert self._stage is not None, "stages are made in Trainer.fit, validate, test and predict"
        return self._stage

    def are_of(self, module: pl.LightningModule) -> bool:
        """Has the module been divided here, in an earlier run?"""
        return self._stage is not None and self._stage.module is module

    def take(self, run: Run, parts: Partition) -> None:
        """Make this rank's stage of the module, once for a module. The other stages' layers are dropped."""
        module, replicas = run.module, run.groups.along("data")
        with attributes_kept(module):
            self._stage = Stage(module, parts, run.layout.stage, run.device)
            configure_part(module)
            if self._options.data_parallel_kind == "fully_shard" and replicas.size() > 1:
                # Before the stage's hooks: after its last layer they leave the step, and torch's have to run by then.
                # One that is called twice would be freed between its backwards, which needn't be as many on all
                # replicas.
                layers = untied(module, (name for name in self._stage.layers if parts.layers.count(name) == 1))
                hosts = run.groups.on_host(run.layout.peers("data"))
                self.fully_sharded = FullyShardedLayers(layers, replicas, hosts, run.device)

    def install(self) -> None:
        """Hook the module: from now on its steps are cut."""
        self.stage.install(recompute=self._options.activation_checkpointing)

    @property
    def layers(self) -> str:
        """This rank's layers, in words."""
        parts, stage = self.stage.partition, self.stage.index
        span = " and ".join(_span([parts.layers[i] for i in parts.layers_of(chunk)]) for chunk in self.stage.chunks)
        outside = [name for name in parts.outside if stage in parts.stages_with(name)]
        return f"{span} with {', '.join(outside)}" if outside else span

    @property
    def has_plain_layers(self) -> bool:
        """Do layers run as in one process: once a call (not recomputed), with whole parameters (not sharded)?"""
        return self.fully_sharded is None and not self._options.activation_checkpointing

    # -- tied and loose parameters -------------------------------------------------------------------------------

    def join_shared(self, local: LocalModel, run: Run) -> None:
        """Make parameters that several stages hold equal on them, as the first of these stages has them. All ranks call
        it.

        Raises:
            ValueError: replicas hold one of them whole on a stage, and in parts on another.
        """
        self._shared = []
        layout, groups = run.layout, run.groups
        if self.fully_sharded is not None:
            self._refuse_whole_and_in_parts(local, groups.along("pipeline"))
        by_stages: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self.stage.partition.shared().items():
            by_stages.setdefault(stages, []).append(name)
        for stages, names in by_stages.items():
            if layout.stage in stages:
                ranks = [layout.rank_at(pipeline=stage) for stage in stages]
                group = groups.joining(ranks)
                parameters = {name: local.parameters[name] for name in names}
                self._shared.append((group, groups.on_host(ranks), parameters))
                broadcast_tensors(map(local_part, parameters.values()), layout.rank_at(pipeline=stages[0]), group)

    def _refuse_whole_and_in_parts(self, local: LocalModel, pipeline: dist.ProcessGroup) -> None:
        """A stage that reads a parameter outside of its layer, as a mean teacher does, holds it whole."""
        own = {name: name in local.replicated for name in self.stage.partition.shared() if name in local.parameters}
        seen: dict[str, bool] = {}
        for stage in gather_objects(own, pipeline):
            for name, is_whole in stage.items():
                if seen.setdefault(name, is_whole) != is_whole:
                    raise ValueError(
                        f"data_parallel_kind='fully_shard': '{name}' is in parts on the stage of its layer, and whole "
                        f"on another one, which reads it outside of the layer or changes it. Use 'replicate'."
                    )

    @property
    def shared(self) -> dict[str, nn.Parameter]:
        """The parameters that this stage and others have, by name, once they are joined."""
        return {name: parameter for *_, parameters in self._shared for name, parameter in parameters.items()}

    def summed_shared(self, gradients: Gradients) -> Gradients:
        """The gradients, those of shared parameters summed over the stages that hold them. A parameter that got a
        gradient on no stage keeps none, as in a single process, where the optimizer skips it."""
        for group, host_group, parameters in self._shared:
            trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            gradients = {**gradients, **summed_over(group, trained, gradients, host_group)}
        return gradients

    def refuse_own_updates(self, updates: Mapping[str, bool], count: int, *, late: bool) -> None:
        """Refuse layers that change their parameters in place where the result would differ from one process.

        Args:
            updates: by the names of these parameters, whether another forward leaves them as they are then.
            count: the number of forwards in a batch.
            late: backwards read weights of their own versions.
        """
        if self.fully_sharded is not None:
            why = "it would change a copy that is gathered for the step, and then freed"
        elif late:
            why = "in the asynchronous pipeline several batches are under way at once"
        elif count > 1:
            why = f"it would do so once for each of {count} microbatches"
        elif self._options.activation_checkpointing:
            why = "with activation_checkpointing=True it would do so twice"
        else:
            return
        harmless = {name for name, settles in updates.items() if settles and self.fully_sharded is None and not late}
        for name in sorted(updates.keys() - harmless):
            raise ValueError(
                f"A layer changes its parameter '{name}' in place in its forward: {why}. Compute with another tensor, "
                f"as in F.linear(x, self.weight * self.mask), or change it in on_train_batch_start."
            )

    def counts(self, name: str) -> bool:
        """Is this the stage whose copy of a parameter enters a norm over all stages? It is the first one that has
        it."""
        return self.stage.partition.owners[name][0] == self.stage.index

    def end(self) -> None:
        """Remove the hooks from the module. It stays cut."""
        if self._stage is not None:
            self._stage.remove()


def _span(names: list[str]) -> str:
    """A chunk's layers, in words."""
    several = f"{names[0]} .. {names[-1]} ({len(names)} layers)" if names else "no layers"
    return names[0] if len(names) == 1 else several


def refuse_training(module: pl.LightningModule) -> None:
    """Refuse modules that no pipeline can train."""
    if is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__}.backward is overridden, but a pipeline's schedule runs the backward, stage by "
            f"stage. Remove the override; hooks such as on_after_backward are called."
        )
    for name, part in module.named_modules():
        if is_graphed(part):
            raise ValueError(
                f"'{name}' was made by torch.cuda.make_graphed_callables: each call writes its output where the last "
                f"one lay, and a pipeline has several microbatches in flight. Leave it as it was, or compile it."
            )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError("training_step(dataloader_iter): a pipeline splits batches, so it needs training_step(batch).")


def refuse_evaluation(module: pl.LightningModule) -> None:
    """Refuse modules that no pipeline can evaluate."""
    for step in (module.validation_step, module.test_step, module.predict_step):
        # None switches validation off.
        if step is not None and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ValueError(
                f"{step.__name__}(dataloader_iter): a pipeline makes a dry run of a step before it runs it, so the "
                f"first batch would be lost. Take {step.__name__}(batch, batch_idx)."
            )
