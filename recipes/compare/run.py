"""Runs a model and its data under one strategy after the other, each in worker processes of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from recipes import record
from recipes.compose import resolved
from recipes.configs import Configs
from recipes.launchers.launcher import WorkersFailed
from recipes.problem import ConfigError
from recipes.schema import world_size
from recipes.traffic import KINDS, POINT_TO_POINT

REFERENCE = "single"
STRATEGIES = (
    "dp",
    "ddp",
    "fsdp",
    "tensor_parallel",
    "pipeline_naive",
    "pipeline_sync",
    "pipeline_1f1b",
    "pipeline_interleaved",
    "pipeline_zbv",
    "pipeline_async",
)
_WARMUP, _COUNTED = 5, 2  # updates, of a run that is long enough
_LEAST_STEPS = 6


@dataclass(frozen=True)
class Outcome:
    """How a run under a strategy went.

    Attributes:
        config: resolved; None where it could not even be composed.
        error: why there are no figures, in a line; None where there are.
        ranks: what each rank has measured (:mod:`recipes.compare.measure`), by rank.
        metrics: of rank 0 at the end.
    """

    strategy: str
    config: Mapping[str, Any] | None
    error: str | None
    ranks: Sequence[Mapping[str, Any]] = ()
    metrics: Mapping[str, float | None] | None = None


def configs(
    overrides: Sequence[str], strategies: Sequence[str], folder: Path, own: Configs | None = None
) -> Iterator[Outcome]:
    """For each strategy its resolved config, with what measures it; or what is wrong with that.

    Args:
        overrides: as of ``recipes.train``; ``strategy.KEY=VALUE`` is for the strategies that have such a key.
        folder: of all runs; each gets one in it, by the strategy's name.
        own: where configs are found; default: in conf/ only.

    Raises:
        ConfigError: what is wrong with it under every strategy.
    """
    from recipes.validate import validate  # here: it imports torch, for which --help need not wait

    own = own or Configs()
    with own.opened():
        nodes = {strategy: own.composed([f"strategy={strategy}"]).strategy for strategy in strategies}
        nowhere = [word for word in overrides if not any(_concerns(node, word) for node in nodes.values())]
        if nowhere:
            raise ConfigError(f"{word}: none of {', '.join(strategies)} has such a value" for word in nowhere)
        for strategy, node in nodes.items():
            output = str(folder / strategy)
            words = [word for word in overrides if _concerns(node, word)]
            try:
                config = resolved(own.composed([*words, f"strategy={strategy}"]), output)
            except (HydraException, OmegaConfBaseException) as error:
                yield Outcome(strategy, None, str(error).splitlines()[0])
                continue
            problems = validate(config)
            if problems:
                yield Outcome(strategy, config, "; ".join(map(str, problems)))
            else:
                yield Outcome(strategy, _measured(config, output), None)


def _concerns(strategy: Mapping[Any, Any], override: str) -> bool:
    """Whether an override sets a value that the strategy has, or none of a strategy's."""
    group, _, key = override.partition("=")[0].partition(".")
    return group != "strategy" or key.split(".")[0] in strategy


def _measured(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config with what measures it, and without what would disturb it: checkpoints, logs, progress bars."""
    trainer = dict(config["trainer"])
    steps = trainer["max_steps"]
    if steps < _LEAST_STEPS:
        raise ConfigError([f"trainer.max_steps={steps}: too few to be measured; use {_LEAST_STEPS} or more"])
    trainer |= {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": steps}
    trainer["val_check_interval"] = steps * trainer["accumulate_grad_batches"]  # once, at the end
    measure = {
        "_target_": "recipes.compare.measure.Measure",
        "folder": folder,
        "warmup": min(_WARMUP, steps // 3),
        "counted": _COUNTED,
    }
    staged = "stages" in config["strategy"]
    strategy = {**config["strategy"], "timeline": True} if staged else config["strategy"]
    return {
        **config,
        "trainer": trainer,
        "strategy": strategy,
        "timeline": staged,
        "logger": {},
        "callbacks": {"measure": measure},
        "test": False,
    }


def run(planned: Outcome) -> Outcome:
    """Runs what :func:`configs` gave, and reads what its ranks have measured."""
    from recipes.build import launcher  # here: they import torch, for which --help need not wait
    from recipes.schema import world_size

    if planned.error is not None or planned.config is None:
        return planned
    config = dict(planned.config)
    folder = Path(config["paths"]["output_dir"])
    folder.mkdir(parents=True)
    config_file = folder / record.CONFIG
    config_file.write_text(yaml.safe_dump(config, sort_keys=False))
    record.start(folder, config, {"strategy": planned.strategy})
    processes = world_size(config)
    try:
        launcher(config).launch(config_file, processes)
    except WorkersFailed as failed:
        record.end(folder, "failed", failed.failure.as_dict())
        return Outcome(planned.strategy, config, f"rank {failed.failure.rank}: {failed.failure.message}")
    ranks = [json.loads((folder / f"measured-{rank}.json").read_text()) for rank in range(processes)]
    return Outcome(planned.strategy, config, None, ranks, record.read_metrics(folder))


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


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row each; efficiencies where the reference is among them."""
    reference = next((_row(o, None) for o in outcomes if o.strategy == REFERENCE and o.error is None), None)
    return [_row(outcome, reference) for outcome in outcomes]


def _row(outcome: Outcome, reference: Row | None) -> Row:
    if outcome.error is not None or outcome.config is None or outcome.metrics is None:
        return Row(outcome.strategy, outcome.error)
    config, ranks = outcome.config, outcome.ranks
    processes = world_size(config)
    # dp's replicas are in one process.
    devices = 1 if outcome.strategy == REFERENCE else max(processes, int(config["cluster"]["devices"]))
    first, median, third = quantiles(ranks[0]["seconds"], n=4, method="inclusive")
    data, accumulated = config["data"], config["trainer"]["accumulate_grad_batches"]
    batch, context = data.get("batch_size"), data.get("context")
    samples = batch * accumulated / median if batch else None
    bubble, theory = _bubble(ranks)
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
