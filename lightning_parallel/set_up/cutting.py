"""Decides where a module is cut: every rank traces the first step, and all take the first rank's partition."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from lightning_parallel.absent.tensor import AbsentTensor, AbsentValueError
from lightning_parallel.batch import cloned
from lightning_parallel.cuts.partition import Partition
from lightning_parallel.cuts.search import partition
from lightning_parallel.loading.first_batch import as_in, first_step
from lightning_parallel.ranks.collectives import all_alike, broadcast_object, gather_objects, together
from lightning_parallel.ranks.layout import Placement
from lightning_parallel.ranks.run import Run
from lightning_parallel.results.logs import trial
from lightning_parallel.set_up.options import StagedOptions
from lightning_parallel.set_up.splitting import WAYS_TO_SPLIT, Splitting
from lightning_parallel.set_up.step_hooks import StepHooks


def agreed_partition(
    run: Run, options: StagedOptions, splitting: Splitting, placement: Placement, *, keep_together: bool
) -> Partition:
    """The partition of a module, the same on all ranks; ``placement`` and ``keep_together`` as in
    :func:`.search.partition`.

    Raises:
        ValueError: the module can't be cut like this.
        RuntimeError: another Trainer has cut it, or ranks that get the same batch see different calls.
    """
    trainer, module, layout = run.trainer, run.module, run.layout
    if any(isinstance(p, AbsentTensor) for p in module.parameters()):
        raise RuntimeError(
            "This LightningModule holds one stage of a pipeline that another Trainer has made of it. Make a new one, "
            "and load it from a checkpoint."
        )
    if placement == (0,) and options.keeps_steps_whole(layout.size("data")):
        return Partition.whole(module)

    def partition_by(step: _TracedStep) -> Partition:
        with as_in(trainer, module), trial(trainer, module) as logged:
            # With a copy of the batch: an iterator's first one is put back.
            hooks = StepHooks(module, cloned(step.arguments[0])) if run.trains else None
            found = partition(
                module,
                step.run,
                layout.stages,
                options.layers,
                options.balance,
                placement=placement,
                logged=logged,
                hooks=hooks,
                recompute=options.activation_checkpointing and run.trains,
                keep_together=keep_together,
            )
            if hooks is not None:
                hooks.check(found, layout.stage)
            return found

    def check_whole(part: _TracedStep, whole: _TracedStep, count: int) -> None:
        """Refuse a step that raises an error by itself on a microbatch, and doesn't on the whole batch. A partition may
        be found all the same: the trace ends at the error."""
        with suppress(Exception):
            partition_by(whole)
        if part.error is not None and whole.error is None:
            cause = part.error.__cause__ or part.error
            raise ValueError(
                f"training_step fails on the first of {count} microbatches, but not on the whole batch: "
                f"{type(cause).__name__}: {cause}. {WAYS_TO_SPLIT}."
            ) from part.error

    def cut() -> Partition:
        try:
            step = first_step(run)
            batch, *others = step.args
            parts = splitting.parts(batch)[0] if run.trains else [batch]
            part = _TracedStep(step.func, (parts[0], *others))
            try:
                return partition_by(part)
            finally:
                if part.error is not None and len(parts) > 1:
                    check_whole(part, _TracedStep(step.func, step.args), len(parts))
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
                "Before training, a dry run of the first step shows where the model can be cut. What the step and its "
                "loader need must exist by then: make it in __init__, setup or configure_model, not in on_fit_start or "
                "on_train_start."
            )
            raise

    mine = together(None, cut)
    check_equal(mine, run.groups.model)
    # Replicas see batches of their own, perhaps of other shapes: the first one decides.
    return broadcast_object(mine, 0, None)


class _TracedStep:
    """A step with its arguments. It runs on copies of the batch. ``error`` is what its first run has raised by itself,
    not for want of a value. Later runs go on with guessed values."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.error: Exception | None = None
        self._has_run = False

    def run(self) -> Any:
        is_first, self._has_run = not self._has_run, True
        try:
            return self.function(*cloned(self.arguments))
        except Exception as error:
            # Operations on absent tensors fail as in one process where shapes don't fit. Where values are missing,
            # torch names the meta device.
            of_shapes = type(error.__cause__) is RuntimeError and "meta" not in str(error.__cause__)
            if is_first and (of_shapes or not isinstance(error, AbsentValueError)):
                self.error = error
            raise


def check_equal(mine: Partition, group: dist.ProcessGroup) -> None:
    """Check that all ranks of a group have seen the same calls.

    Raises:
        RuntimeError: on all ranks. It names the first call that differs.
    """
    own = list(mine.calls)
    if all_alike(group, own):
        return
    first, *others = gather_objects(own, group)
    for rank, calls in enumerate(others, start=1):
        pairs = enumerate(zip_longest(first, calls), start=1)
        for number, pair in ((number, pair) for number, pair in pairs if pair[0] != pair[1]):
            one, other = ("the end" if call is None else repr(call[0]) for call in pair)
            raise RuntimeError(
                f"The ranks of one replica see different calls in the first step: call {number} is {one} on the first "
                f"rank, and {other} on rank {rank} of the group. The step must not depend on the rank, nor on random "
                f"numbers that differ from rank to rank: seed them with seed_everything(...)."
            )
