"""From what the ranks of a run have measured to the figures of one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import fmean, quantiles
from typing import Any

from recipes.compare.run import REFERENCE, Outcome
from recipes.schema import world_size
from recipes.traffic import KINDS, POINT_TO_POINT


@dataclass(frozen=True)
class Row:
    """The figures of one strategy; None where there are none. Bytes are of one rank, the mean over all, if not said.

    Attributes:
        devices: that worked on it: processes, or replicas in one process.
        quartiles: of the step's seconds.
        samples, tokens: a second, by the median step.
        peaks: bytes of each rank (of each GPU, where one process has several).
        held: bytes by what they are: parameters, gradients, optimizer.
        sent: bytes on the wire in a step, by kind of message.
        blocked: share of time in which the threads that compute waited for messages.
        queued: share of time in which they had no core.
        bubble, theory: shares of the stages' time.
        predicted: seconds of a step, and bytes of tensors on the fullest rank, by a plan.
    """

    strategy: str
    error: str | None = None
    processes: int = 0
    devices: int = 0
    quartiles: tuple[float, float, float] = (nan, nan, nan)
    samples: float | None = None
    tokens: float | None = None
    efficiency: float | None = None
    peaks: Sequence[float] = ()
    held: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)
    blocked: float | None = None
    queued: float | None = None
    bubble: float | None = None
    theory: float | None = None
    loss: float | None = None
    predicted: tuple[float, float] | None = None

    @property
    def step(self) -> float:
        """Seconds of the median step."""
        return self.quartiles[1]

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return max(self.peaks)

    @property
    def imbalance(self) -> float:
        """The fullest rank's memory in units of the mean."""
        return max(self.peaks) / fmean(self.peaks)


def rows(outcomes: Sequence[Outcome], plan: Sequence[Mapping[str, Any]] = ()) -> list[Row]:
    """A row each; efficiencies where the reference is among them, predictions where a plan has the layout."""
    reference = next((_row(o, None, ()) for o in outcomes if o.strategy == REFERENCE and o.error is None), None)
    return [_row(outcome, reference, plan) for outcome in outcomes]


def _row(outcome: Outcome, reference: Row | None, plan: Sequence[Mapping[str, Any]]) -> Row:
    if outcome.error is not None or outcome.config is None or outcome.metrics is None:
        return Row(outcome.strategy, outcome.error)
    config, ranks = outcome.config, outcome.ranks
    processes = world_size(config)
    # data_parallel's replicas are in one process.
    devices = 1 if outcome.strategy == REFERENCE else max(processes, int(config["cluster"]["devices"]))
    first, median, third = quantiles(ranks[0]["seconds"], n=4, method="inclusive")
    data, accumulated = config["data"], config["trainer"]["accumulate_grad_batches"]
    batch, context = data.get("batch_size"), data.get("context")
    samples = batch * accumulated / median if batch else None
    bubble, theory = _bubble(ranks)
    words = {f"strategy={outcome.strategy}", *ranks[0].get("words", ())}
    predicted = next((each for each in plan if words <= {*each["overrides"]}), None)
    return Row(
        strategy=outcome.strategy,
        processes=processes,
        devices=devices,
        quartiles=(first, median, third),
        samples=samples,
        tokens=samples * context if samples and context else None,
        efficiency=reference.step / median / devices if reference else None,
        peaks=[peak for rank in ranks for peak in rank["peaks"]],
        held={name: fmean(rank["held"][name] for rank in ranks) for name in ("parameters", "gradients", "optimizer")},
        sent=_sent(ranks),
        blocked=fmean(rank["thread"]["blocked"] for rank in ranks),
        queued=fmean(rank["thread"]["queued"] for rank in ranks),
        bubble=bubble,
        theory=theory,
        loss=_loss(outcome.metrics, config["optimized_metric"]),
        predicted=(predicted["seconds"], predicted["bytes"]) if predicted else None,
    )


def _sent(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the mean rank, by kind; what a rank sent point to point is what the others received from it."""
    totals = dict.fromkeys(KINDS, 0.0)
    for rank in ranks:
        for kind, nbytes in rank["sent"].items():
            totals[kind] = totals.get(kind, 0.0) + nbytes
        totals[POINT_TO_POINT] += rank["received"]
    return {kind: total / len(ranks) for kind, total in totals.items() if total}


def _bubble(ranks: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Measured and by theory, of the first replica's stages. Without a flush: while the pipeline is full."""
    from lightning_parallel.timeline.recording import Span, measured_bubble, utilisation

    staged = [
        rank for rank in ranks if "spans" in rank and not (rank["coordinates"]["data"] or rank["coordinates"]["tensor"])
    ]
    if not staged:
        return None, None
    staged.sort(key=lambda rank: rank["coordinates"]["pipeline"])
    spans = [[Span(**span) for span in rank["spans"]] for rank in staged]
    theory = staged[0]["bubble"]
    full = utilisation(spans) if theory == 0 else None
    return (measured_bubble(spans) if full is None else 1 - full), theory


def _loss(metrics: Mapping[str, float | None], name: str | None) -> float | None:
    value = metrics.get(name) if name else None
    return metrics.get("train_loss") if value is None else value
