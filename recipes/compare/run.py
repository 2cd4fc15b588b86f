"""Runs a model and its data under one strategy after the other, each in worker processes of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from recipes import record
from recipes.compose import resolved
from recipes.configs import Configs
from recipes.launch import write
from recipes.launchers.launcher import WorkersFailed
from recipes.problem import ConfigError

REFERENCE = "single"
STRATEGIES = (
    "data_parallel", "ddp", "fully_sharded", "tensor_parallel", "pipeline_naive", "pipeline_gpipe", "pipeline_1f1b",
    "pipeline_interleaved", "pipeline_zbv", "pipeline_async",
)  # fmt: skip
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


def plan(reference: Outcome) -> list[dict[str, Any]]:
    """What is predicted of each layout, by one process with the reference's config. None where that can't be done."""
    if reference.config is None:
        return []
    folder = Path(reference.config["paths"]["output_dir"]).with_name("plan")
    paths = {**reference.config["paths"], "output_dir": str(folder)}
    config = {**reference.config, "command": "plan", "callbacks": {}, "paths": paths}
    outcome = run(Outcome("plan", config, reference.error))
    found: Any = json.loads((folder / record.PLAN).read_text()) if outcome.error is None else {"rows": []}
    return list(found["rows"])


def run(planned: Outcome) -> Outcome:
    """Runs what :func:`configs` gave, and reads what its ranks have measured."""
    from recipes.build import launcher  # here: they import torch, for which --help need not wait
    from recipes.schema import world_size

    if planned.error is not None or planned.config is None:
        return planned
    config = dict(planned.config)
    folder = Path(config["paths"]["output_dir"])
    folder.mkdir(parents=True)
    config_file = write(config)
    record.start(folder, config, {"strategy": planned.strategy})
    processes = world_size(config)
    try:
        launcher(config).launch(config_file, processes)
    except WorkersFailed as failed:
        record.end(folder, "failed", failed.failure.as_dict())
        return Outcome(planned.strategy, config, f"rank {failed.failure.rank}: {failed.failure.message}")
    files = [folder / f"measured-{rank}.json" for rank in range(processes)]
    ranks = [json.loads(file.read_text()) for file in files if file.exists()]  # a plan has none
    return Outcome(planned.strategy, config, None, ranks, record.read_metrics(folder))
