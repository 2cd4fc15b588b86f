"""Evaluation: batches stream through the stages, forward only.

A batch is one message to the next stage, and no stage waits for the end of one: metrics meet at the end of the loop.
Evaluation needs of a rank what training needs too, so both are here: its engine, and what crosses the cuts in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parallel.agreement import first_few, gather
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.flow import Flow, tensors_of
from lightning_parallel.strategies.last_stage import LastStageStrategy
from lightning_parallel.strategies.metrics import logging_through, named_loss_of_peers

MANY = 4  # tensors that may cross a cut beside the chain without a warning, as a U-Net's skip connections do


class StreamedEvaluation(LastStageStrategy):
    """A staged strategy that validates, tests and predicts."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._engine: Engine | None = None
        self._flows: dict[str, Flow] = {}  # by the kind of step
        self._warned = False  # of what crosses the cuts
        self._evaluations = 0

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._flows = {}
        self._warned = False
        self._engine = self.make_engine()

    def make_engine(self) -> Engine:
        """What runs this rank's stage."""
        raise TypeError(f"{type(self).__name__} is abstract: it has no engine")

    def _follow(self, kind: str, step: Callable[[], Any]) -> None:
        """Before a step of some kind: what crosses the cuts in it? Its first one is surveyed."""
        if self.layout.pipeline == 1:
            return
        if kind not in self._flows:
            if self._sharded_layers is not None:
                self._sharded_layers.gather()  # or their hooks would do it, among parameters that are absent
            try:
                self._flows[kind] = self._agreed(partial(self._surveyed, kind, step))
            finally:
                if self._sharded_layers is not None:
                    self._sharded_layers.reshard()
            self._warn_of_cargo(self._flows[kind])
        self.stage.flow = self._flows[kind]

    def _surveyed(self, kind: str, step: Callable[[], Any]) -> Flow:
        logged: list[Any] = []
        trainer = self._module().trainer
        stop = trainer.should_stop
        try:
            with logging_through(self._module(), partial(_keep, logged)), self._alone(kind.split()[0]):
                return self.stage.survey(step, logged)
        finally:
            trainer.should_stop = stop  # the step proper will say so again

    def _agreed(self, look: Callable[[], Flow]) -> Flow:
        """The last stage's view: it runs the end of the step, which may look at the rank. An error on one is one on
        all, for none may wait for what another won't send."""
        flow: Flow | None = None
        failed: Exception | None = None
        try:
            flow = look()
        except Exception as error:  # any: it is raised below, when the others know
            failed = error
        words = None if failed is None else f"{type(failed).__name__}: {failed}"
        with named_loss_of_peers():
            views = gather((self.layout.stage, flow, words), self.groups.pipeline)
        if failed is not None:
            raise failed
        for stage, _, theirs in views:
            if theirs is not None:
                raise RuntimeError(f"stage {stage}: {theirs}")
        last = max(views, key=lambda view: view[0])[1]
        assert last is not None, "no rank failed"
        return last

    def _warn_of_cargo(self, flow: Flow) -> None:
        """A residual sum between the layers is made again on each stage, from all its terms: O(layers) of them."""
        stage = flow.heaviest()
        cargo = flow.out_of(stage)
        if self._warned or tensors_of(cargo) <= MANY:
            return
        self._warned = True
        rank_zero_warn(
            f"{tensors_of(cargo)} tensors cross the cut between stages {stage} and {stage + 1} beside the output of "
            f"the last layer before it, for each microbatch, and their gradients come back: the outputs of "
            f"{first_few([repr(item.module) for item in cargo])}. Later stages use them. If training_step or forward "
            f"adds them up between the layers, as in `x = x + layer(x)`, move this into the layer's forward: then its "
            f"output is all that crosses."
        )

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate(self._module().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate(self._module().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate(self._module().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A batch streams through undivided, so metrics see what they see in one process; nobody waits for its end."""
        self._evaluations += 1
        bound = partial(step, *args, **kwargs)
        self._follow(f"{step.__name__} {args[2:]}", bound)  # a loader of its own may have a step of its own
        with self._alone(step.__name__, *(index for index in args[1:] if isinstance(index, int))):
            output = self.engine.evaluate(bound, self._evaluations)
        if self._sharded_layers is not None:
            self._sharded_layers.reshard()
        return output

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._engine = None  # its links hold connections, whose end is what the neighbours notice
        super().on_exception(exception)


def _keep(logged: list[tuple[Any, ...]], *args: Any, **kwargs: Any) -> None:
    """``self.log`` in a step that is only looked at."""
    logged.append((args, kwargs))
