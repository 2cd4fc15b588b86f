"""Decides where a module is cut: every rank traces the first step, and all take the first rank's partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_parallel.batch import batch_size, rebuilt, split
from lightning_parallel.collectives import broadcast_object, decided_by_first, gather_if_different, together
from lightning_parallel.layout import Layout, Placement
from lightning_parallel.parts.batch_watch import BatchWatch
from lightning_parallel.parts.first_batch import STEPS, as_in, evaluating, first_step, validation_on
from lightning_parallel.parts.logs import logging_trial, trial
from lightning_parallel.parts.options import StagedOptions
from lightning_parallel.parts.step_hooks import StepHooks
from lightning_parallel.pipeline.absent import AbsentValueError
from lightning_parallel.pipeline.flow import FlowError
from lightning_parallel.pipeline.partition import Partition
from lightning_parallel.pipeline.partitioning import partition
from lightning_parallel.pipeline.survey import survey

Partitions: TypeAlias = dict[Placement, Partition | str]  # by placement; a text says why there is none


def agreed_partition(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    options: StagedOptions,
    layout: Layout,
    model_group: dist.ProcessGroup,
    automatic_microbatches: Callable[[int], int],
    placements: Sequence[Placement],
    choose: Callable[[Partitions, int], Placement],
) -> Partition:
    """The partition of a module, the same on all ranks.

    Args:
        model_group: the ranks that hold one copy of the model together.
        automatic_microbatches: gives the number for ``microbatches="auto"``, from a batch's size.
        placements: for each schedule that may run, the stage of each chunk. The plainest comes first.
        choose: picks a placement among those that have a partition, given the first batch's number of microbatches. It
            is called on the first rank, and only if there are several.

    Raises:
        ValueError: the module can't be cut like this.
        RuntimeError: ranks that get the same batch see different calls.
    """
    count = 1  # of microbatches

    def first_microbatch(batch: Any) -> Any:
        nonlocal count
        size = batch_size(batch)
        count = min(automatic_microbatches(size) if options.microbatches == "auto" else options.microbatches, size)
        return split(batch, count)[0]

    def look() -> Partitions:
        assert trainer.state.fn is not None
        fitting = STEPS[trainer.state.fn] == "training_step"
        step = first_step(trainer, module, first_microbatch if fitting else lambda batch: batch)
        try:
            with as_in(trainer, module), trial(trainer, module):
                if len(placements) > 1:
                    return _looked_at(trainer, module, options, layout, step, placements)
                parts, hooks = _cut(trainer, module, options, layout, step, placements[0])
                if hooks is not None:
                    hooks.check(parts, layout.stage)
                return {placements[0]: parts}
        except AbsentValueError as error:
            error.add_note(
                "The step asks for a value between the layers, which only one stage has. Ask for it inside a layer's "
                "own forward, or after the layers."
            )
            raise
        except ValueError:  # a setting's
            raise
        except Exception as error:
            error.add_note(
                "The first step was looked at before training, to see where the model can be cut. What it needs must "
                "exist by then: make it in __init__, setup or configure_model, not in on_train_start."
            )
            raise

    world = dist.group.WORLD
    assert world is not None, "the ranks have met"
    mine = together(world, look)
    chosen = placements[0]
    if len(placements) > 1:
        mine = _allowed(mine, gather_if_different(_refused(mine), world), only_first=options.balance == "time")
        # By the first rank's view, as all replicas take its cuts.
        chosen = decided_by_first(world, lambda: choose(mine, count))
    if options.balance != "time":
        for parts in mine.values():
            if isinstance(parts, Partition):
                check_equal(parts, model_group)
    # Replicas see batches of their own, perhaps of other shapes: the first one decides.
    own = mine[chosen]
    return broadcast_object(own if isinstance(own, Partition) else None, 0, world, trainer.strategy.root_device)


def _cut(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    options: StagedOptions,
    layout: Layout,
    step: partial[Any],
    placement: Placement,
) -> tuple[Partition, StepHooks | None]:
    """Cut a module by traces of its step, on copies of the batch's tensors, since an iterator's first batch is put
    back. Also returned are the module's own hooks around a training step, which are to be checked."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    balance = options.balance
    if balance == "time" and layout.rank > 0:  # only the first rank's partition counts
        balance = "parameters"
    hooks = StepHooks(trainer, module, partial(step.func, *rebuilt(step.args, torch.clone))) if fitting else None
    found = partition(
        module,
        partial(BatchWatch().look, step.func, *step.args),
        layout.stages,
        options.layers,
        balance,
        trainer.strategy.root_device,
        placement=placement,
        hooks=hooks,
        recompute=options.activation_checkpointing and fitting,
    )
    return found, hooks


def _looked_at(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    options: StagedOptions,
    layout: Layout,
    step: partial[Any],
    placements: Sequence[Placement],
) -> Partitions:
    """Cut a module for several placements, and check by dry runs that its steps can be run so.

    Raises:
        Exception: the first placement's, if none is possible.
    """
    views: Partitions = {}
    errors: list[Exception] = []
    trained: Partition | None = None  # the plainest partition in which the training step can be run
    for placement in placements:
        try:
            parts, hooks = _cut(trainer, module, options, layout, step, placement)
            _check_step(trainer, module, parts, "training_step", step)
            if hooks is not None:
                hooks.check(parts, layout.stage)
            trained = trained or parts
            _check_validation(trainer, module, parts, step)
            views[placement] = parts
        except Exception as error:  # any: what this placement doesn't allow, another one may
            plain = isinstance(error, ValueError | RuntimeError)
            views[placement] = str(error) if plain else f"{type(error).__name__}: {error}"
            errors.append(error)
    if len(errors) == len(placements):
        if trained is None:
            raise errors[0]
        views[trained.placement] = trained  # perhaps no validation runs, or another one than was looked at
    return views


def _check_validation(trainer: pl.Trainer, module: pl.LightningModule, parts: Partition, step: partial[Any]) -> None:
    """Check by a dry run on a training batch that the validation step can be run in these chunks.

    Raises:
        FlowError: it can't be run in these chunks.
        AbsentValueError: it asks for a value that another chunk has.
    """
    validation = validation_on(trainer, module, step.args[0])
    if validation is None:
        return
    try:
        with evaluating(trainer, module):
            _check_step(trainer, module, parts, "validation_step", validation)
    except (FlowError, AbsentValueError):
        raise
    except Exception:  # any: its own batches may be others, so nothing is known
        pass


def _check_step(
    trainer: pl.Trainer, module: pl.LightningModule, parts: Partition, name: str, step: partial[Any]
) -> None:
    """Check a step by the same dry run that comes before its first real run.

    Raises:
        Exception: of :func:`.survey`.
    """
    watch = BatchWatch()
    with logging_trial(trainer, module) as logged:
        survey(module, parts, partial(watch.look, step.func, *step.args), logged)
    watch.check(name, parts)


def _refused(views: Partitions) -> dict[Placement, str]:
    return {placement: text for placement, text in views.items() if isinstance(text, str)}


def _allowed(mine: Partitions, refused: Sequence[dict[Placement, str]], *, only_first: bool) -> Partitions:
    """This rank's partitions, with the reason in the place of each that some rank refuses; with ``only_first``, that
    the first rank refuses, since the others have other partitions.

    Raises:
        RuntimeError: on all ranks, if nothing is left.
    """
    texts: dict[Placement, str] = {}
    for each in refused[: 1 if only_first else None]:
        texts |= each
    if len(texts) == len(mine):
        raise RuntimeError(f"schedule='auto': no schedule can run. {' '.join(dict.fromkeys(texts.values()))}")
    return {**mine, **texts}


def check_equal(mine: Partition, group: dist.ProcessGroup) -> None:
    """Check that all ranks of a group have seen the same calls and cut them alike.

    Raises:
        RuntimeError: on all ranks. It names the first call that differs.
    """
    views = gather_if_different((list(mine.calls), mine.bounds), group)
    first_calls, _ = views[0]
    for rank, view in enumerate(views):
        if view == views[0]:
            continue
        calls, _ = view
        differ = next((k for k, (a, b) in enumerate(zip(first_calls, calls, strict=False)) if a != b), None)
        k = min(len(first_calls), len(calls)) if differ is None else differ
        names = [repr(c[k][0]) if k < len(c) else "the end" for c in (first_calls, calls)]
        raise RuntimeError(
            f"The ranks of one replica see different calls in the first step: call {k + 1} is {names[0]} on the first "
            f"rank, and {names[1]} on rank {rank} of the group. The step must not depend on the rank, nor on random "
            f"numbers that differ from rank to rank: seed them with seed_everything(...)."
        )
