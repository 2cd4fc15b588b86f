"""Validation, test and prediction in a pipeline: batches stream through the stages, forward only.

A batch is one message to the next chunk, and with one chunk a stage no stage waits for the end of a batch. It is not
split, so metrics see what they see in one process; only the batch of a step of several passes is split
(``several_passes.py``). Metrics are published at the end of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from lightning_parallel.passes import first_pass, passes_of
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.ranks.run import Run
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.set_up.dry_runs import DryRuns
from lightning_parallel.set_up.stages import Stages
from lightning_parallel.set_up.tensor_shards import TensorShards
from lightning_parallel.steps.earlier_chunks import EarlierChunks
from lightning_parallel.steps.several_passes import Relay, run_in_passes


class Evaluation:
    """Runs the user's evaluation steps on this rank's stage.

    Args:
        dry_runs: makes a dry run of the first step of each kind.
        shards: compares the losses of tensor ranks.
        earlier: drops what runs for earlier chunks log.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        stages: Stages,
        dry_runs: DryRuns,
        last_stage: LastStage,
        shards: TensorShards,
        earlier: EarlierChunks,
    ) -> None:
        self._engine, self._stages, self._shards, self._earlier = engine, stages, shards, earlier
        self._dry_runs, self._last_stage = dry_runs, last_stage
        self._module = run.module
        self._relay = Relay(run)
        self._batches = 0

    def run(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step`` (the ``kind``) on one batch, the first of
        ``args``. Returns what the step returned on the last stage, and None on the others; a step of several passes
        returns on all."""
        step = getattr(self._module, kind)
        self._batches += 1
        # Each loader may have a step of its own.
        trial = partial(self._dry_runs.on_copy, first_pass(step), *args, **kwargs)
        flow = self._dry_runs.follow(f"{kind} {args[2:]}", trial)
        indices = [index for index in args[1:] if isinstance(index, int)]
        if flow is not None and not any(flow.last):  # it calls no layer, so no stage would leave it
            if not self._stages.stage.has_last_chunk:
                return None
            with self._last_stage.alone(kind, *indices):
                return step(*args, **kwargs)
        passes = passes_of(step)
        if passes is None or self._stages.stage.partition.stages == 1:
            return self._pass(partial(step, *args, **kwargs), kind, indices)
        counter = count()

        def run(one: Callable[[], Any]) -> Any:
            return self._pass(one, kind, [*indices, next(counter)])  # each draws numbers of its own

        return run_in_passes(passes, run, self._stages.stage.partition.stages, self._relay, *args, *kwargs.values())

    def _pass(self, step: Callable[[], Any], name: str, indices: Sequence[int]) -> Any:
        """Run one pass through the stages."""

        def alone() -> Any:
            with self._last_stage.alone(name, *indices):
                return self._shards.run(partial(self._earlier.run, step), name)

        output = self._engine.evaluate(alone, self._batches)
        if self._stages.fully_sharded is not None:
            self._stages.fully_sharded.free()
        return output
