"""The dry run of the first step of a kind, which finds what crosses the cuts between stages.

Before the first real step of each kind (training, the validation step of each loader, ...), every rank runs that step
once on absent tensors (:func:`lightning_parallel.cuts.flow_of_step.flow_of_step`). If it fails on one rank, all ranks
raise. Otherwise all use what the last stage has found, since it alone runs the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.batch import cloned, tensors
from lightning_parallel.cuts.flow import TWICE, Flow, FlowError
from lightning_parallel.private.torch.tensors import version_of
from lightning_parallel.ranks.collectives import gather_objects, together
from lightning_parallel.ranks.run import Run
from lightning_parallel.results.last_stage import LastStage
from lightning_parallel.results.log_joins import depends_on_layers
from lightning_parallel.results.logs import trial
from lightning_parallel.set_up.stages import Stages
from lightning_parallel.values import first_few

# They normalise over samples, also those that keep no statistics.
_OVER_SAMPLES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class DryRuns:
    """Sets on the stage the flow of the step that is about to run.

    Args:
        late: backwards read weights of their own versions.

    Attributes:
        known: by the kind of step, the names whose values :meth:`logged` gives: they depend on no layer.
    """

    def __init__(self, run: Run, stages: Stages, last_stage: LastStage, *, late: bool) -> None:
        self._run, self._stages, self._stage, self._last_stage = run, stages, stages.stage, last_stage
        self._group = run.groups.along("pipeline")
        self._late = late
        self._flows: dict[str, Flow] = {}  # by the kind of step
        self._kind = ""  # the kind of step whose flow is set
        self.known: dict[str, set[str]] = {}
        self._changes_batch = False  # has a step changed the copy of its batch?

    def on_copy(self, step: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Run a step on a copy of its batch, which it may change: as a trial, or for :meth:`set_flow`."""
        own = cloned((arguments, more))
        given = [(tensor, version_of(tensor)) for tensor in tensors(own)]
        try:
            return step(*own[0], **own[1])
        finally:
            self._changes_batch |= any(version_of(tensor) != version for tensor, version in given)

    def set_flow(self, kind: str, step: Callable[[], Any], count: int = 1) -> Flow | None:
        """Set what crosses the cuts in steps of this kind, before such a step runs. The first of a kind gets a dry run.

        Args:
            kind: the name of the user's method first, then what else tells steps apart.
            count: how often the step will be called for one batch.

        Returns:
            The flow; None if there is one chunk, one call, and layers run as in one process.

        Raises:
            RuntimeError: on all ranks, if the step can't be run in stages. Or it changes its batch, and would do so
                once for each of a stage's chunks.
            ValueError: on all ranks, if layers change their parameters in a way that can't be as in one process.
        """
        if self._stage.partition.chunks == 1 and count == 1 and self._stages.has_plain_layers:
            return None
        if kind not in self._flows:
            layers = self._stages.fully_sharded
            with layers.gathered() if layers is not None else nullcontext():  # else hooks would gather in the dry run
                # An error on one rank is raised on all, since none may wait for what another won't send.
                own = self._stage.index, together(self._group, lambda: self._flow_of(kind, step))
                _, flow = max(gather_objects(own, self._group), key=lambda view: view[0])  # the last stage's
                self._flows[kind] = flow
            parameters = {name for name, _ in self._run.module.named_parameters(remove_duplicate=False)}
            of_parameters = {name: settles for name, settles in flow.own_updates.items() if name in parameters}
            self._stages.refuse_own_updates(of_parameters, count, late=self._late)
            if layers is not None and flow.updated:
                raise ValueError(
                    f"{kind.split()[0]} changes '{min(flow.updated)}', of which each replica may hold a part "
                    f"(data_parallel_kind='fully_shard'). Use 'replicate'."
                )
            if count > 1:
                advancing = {name for name, settles in flow.own_updates.items() if not settles} - parameters
                self._warn_of_carried(flow, advancing, count)
        if kind != self._kind:  # seldom: where an evaluation begins or ends
            self._stage.flow, self._kind = self._flows[kind], kind
        return self._flows[kind]

    def _flow_of(self, kind: str, step: Callable[[], Any]) -> Flow:
        self._changes_batch = False
        flow, logged = self._traced(kind, step)
        parts = self._stage.partition
        if self._changes_batch and parts.chunks > parts.stages:
            raise FlowError(
                f"{kind.split()[0]} changes a tensor of its batch in place. {TWICE} change a clone, do it in the data "
                f"loader, or take a schedule with one chunk a stage ('1f1b')."
            )
        if self._stages.fully_sharded is None:  # see `logged`
            values = {name: call["value"] for name, call in logged.items()}
            of_layers = {name for name, v in values.items() if isinstance(v, AbsentTensor) and depends_on_layers(v)}
            self.known[kind] = values.keys() - of_layers
        return flow

    def _traced(self, kind: str, step: Callable[[], Any]) -> tuple[Flow, dict[str, dict[str, Any]]]:
        """What the dry run found, and what was logged until the step needed a value: from there on values are
        guesses."""
        counts: list[int] = []
        with trial(self._run.trainer, self._run.module) as logged, self._last_stage.alone(kind.split()[0]):

            def counted() -> Any:
                try:
                    return step()
                finally:
                    counts.append(len(logged))

            flow = self._stage.flow_of(counted, logged)
        return flow, {call["name"]: call for call in logged[: counts[0]]}

    def logged(self, kind: str, step: Callable[[], Any]) -> dict[str, dict[str, Any]]:
        """The arguments of a step's calls of ``self.log``, by name, in a dry run on this rank alone. Values that depend
        on layers are absent. None are known where layers are gathered: all replicas would have to run it."""
        return {} if self._stages.fully_sharded is not None else self._traced(kind, step)[1]

    def _warn_of_carried(self, flow: Flow, of_layers: Iterable[str], count: int) -> None:
        parts = dict.fromkeys(name.rpartition(".")[0] for name in sorted(of_layers))
        named = self._run.module.named_modules()
        parts |= dict.fromkeys(
            name
            for name, part in named
            if (isinstance(part, _OVER_SAMPLES) and part.training) or getattr(part, "scale_grad_by_freq", False)
        )
        if parts:
            kinds = [f"'{name}' is a {type(self._run.module.get_submodule(name)).__name__}" for name in parts]
            rank_zero_warn(
                f"{first_few(kinds)}: what such a layer computes depends on how often it runs, or on which samples run "
                f"together. It runs on each of {count} microbatches, so the loss differs from that of one process. Use "
                f"microbatches=1, or in the place of BatchNorm GroupNorm or LayerNorm."
            )
        if flow.carried:
            self._run.warn(
                f"training_step keeps and changes {first_few([repr(name) for name in sorted(flow.carried)])}. It is "
                f"called for each of {count} microbatches, so they change {count} times a batch. Count batches in "
                f"on_train_batch_start or on_train_batch_end."
            )
