"""Validation, test and prediction in a pipeline: batches stream through the stages, forward only.

A batch is one message to the next chunk, and with one chunk a stage no stage waits for the end of a batch. It is not
split, so metrics see what they see in one process. Metrics are published at the end of the loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.ranks.run import Run
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.set_up.dry_runs import DryRuns
from lightning_parallel.set_up.stages import Stages
from lightning_parallel.set_up.tensor_shards import TensorShards
from lightning_parallel.steps.earlier_chunks import EarlierChunks


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
        self._batches = 0

    def run(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step`` (the ``kind``) on one batch, the first of
        ``args``. Returns what the step returned on the last stage, and None on the others."""
        step = getattr(self._module, kind)
        self._batches += 1
        # Each loader may have a step of its own.
        trial = partial(self._dry_runs.on_copy, step, *args, **kwargs)
        flow = self._dry_runs.follow(f"{kind} {args[2:]}", trial)
        alone = partial(self._last_stage.alone, kind, *(index for index in args[1:] if isinstance(index, int)))
        if flow is not None and not any(flow.last):  # it calls no layer, so no stage would leave it
            if not self._stages.stage.has_last_chunk:
                return None
            with alone():
                return step(*args, **kwargs)

        def run() -> Any:
            with alone():
                return self._shards.run(partial(self._earlier.run, step, *args, **kwargs), kind)

        output = self._engine.evaluate(run, self._batches)
        if self._stages.fully_sharded is not None:
            self._stages.fully_sharded.free()
        return output
