"""``python -m recipes.train``: composes a config with Hydra, checks it, and launches the workers that run it.

This process builds no model and touches no device. It imports torch only to check values and to launch. So ``--help``
and a misspelt option of a group are answered at once; a wrong value takes some seconds.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from recipes import CONF, record
from recipes.command_line import typed
from recipes.compose import check, resolved
from recipes.configs import Configs
from recipes.launch import launch, write
from recipes.problem import ConfigError, Problem
from recipes.processes import INTERRUPTED, PREEMPTING, REQUEUE, may_be_told
from recipes.worker import start

log = logging.getLogger(__name__)

_AUTO = "strategy=auto"  # what a plan takes

OmegaConf.register_new_resolver("command", typed, replace=True)  # in the help text


class UnknownMetric(CompactHydraException):
    """The metric to optimise is not among those of the run."""


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def run(cfg: DictConfig) -> float | None:
    """One job: returns the metric that a sweep optimises, None if the config names none."""
    from recipes import resume  # here: they import torch
    from recipes.schema import world_size
    from recipes.validate import validate

    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    config = resolved(cfg, str(folder))
    problems = validate(config)
    sweeping = job.mode == RunMode.MULTIRUN
    if resume.would_overwrite(config) and not sweeping:
        fix = "use resume=auto to go on with it, or another folder"
        problems.append(Problem("hydra.run.dir", folder, "an earlier run is there, which would be overwritten", fix))
    if problems:
        raise ConfigError(problems)
    if sweeping and record.read(folder):
        if not record.is_of(folder, config):
            fix = "use another hydra.sweep.dir, or delete it"
            raise ConfigError([f"{folder} has a run with other settings, as a sweep had it in this place; {fix}"])
        if record.read(folder)["status"] == "completed":
            log.info("done before; see %s", folder)
            return _optimized(config["optimized_metric"], record.read_metrics(folder), sweeping=True)
    chosen = job.runtime.choices.items()
    choices = {group: choice for group, choice in chosen if "/" not in group and choice is not None}
    config_file = write(config)
    if config["print_config"]:
        print(config_file.read_text())
    if not config["launch"]:
        command = f"torchrun --nproc-per-node={world_size(config)} -m recipes.worker {config_file}"
        log.info("start it with: %s%s", command, "; a job: cluster.submit=print" * ("submit" in config["cluster"]))
        return None
    metrics = launch(config, choices, job.overrides.task, Configs.of_job(job).recorded)
    return None if metrics is None else _optimized(config["optimized_metric"], metrics, sweeping=sweeping)


def _optimized(name: str | None, metrics: Mapping[str, float | None], *, sweeping: bool) -> float | None:
    """The metric's value; infinite or absent numbers are NaN, as sweepers expect of a failed trial. In a sweep, where
    it would be missed, an absent one is UnknownMetric."""
    if name is None or (name not in metrics and not sweeping):
        return None
    if name not in metrics:
        known = ", ".join(metrics)
        message = f"the run logged no such metric; use one of {known}, or null"
        raise UnknownMetric(f"optimized_metric={name}: {message}")
    value = metrics[name]
    return float("nan") if value is None else value


def main() -> None:
    """The command line. Of several processes that have been started beside each other, rank 0 reads it for all."""
    args = get_args_parser().parse_args()
    if _asks(args) or args.cfg or not may_be_told():
        return compose_and_run(args)
    if args.multirun:
        sys.exit("-m: a sweep starts processes for each of its runs; call it without torchrun")
    from recipes import handover  # here: it imports torch

    config = handover.config_of_run()
    if config is not None:
        return start(config)
    code = 1
    try:
        compose_and_run(args)
        code = 0
    finally:
        handover.hand_on_the_end(code)


def _asks(args: Namespace) -> bool:
    """Does the command line only ask Hydra for something?"""
    return bool(args.help or args.hydra_help or args.info or args.shell_completion)


def _with_the_best(words: Sequence[str]) -> list[str]:
    """A command line with the layout that a plan takes in the place of ``strategy=auto``. The plan is printed."""
    rest = [word for word in words if word != _AUTO]
    with tempfile.TemporaryDirectory(prefix="recipes-plan-") as folder:
        own = [f"hydra.run.dir={folder}", "print_config=false"]
        code = subprocess.run([sys.executable, "-m", "recipes.plan", *rest, *own]).returncode
        plan = Path(folder) / record.PLAN
        if code or not plan.exists():
            sys.exit(code or f"{_AUTO}: it is planned elsewhere; start what that plan says, or use cluster=local")
        best = json.loads(plan.read_text())["best"]
    log.info("%s takes %s", _AUTO, " ".join(best))
    return [*rest, *best]


def compose_and_run(args: Namespace) -> None:
    """All problems with the command line are reported before the first job starts."""
    if _AUTO in args.overrides and not _asks(args):
        sys.argv[1:] = _with_the_best(sys.argv[1:])
        args = get_args_parser().parse_args()
    # Configs in place of all of these are checked as each job starts.
    if not (args.config_path or args.experimental_rerun or _asks(args)):
        try:
            problems = check(args.overrides, multirun=args.multirun, configs=Configs.of_command_line(args))
        except ConfigError as error:
            sys.exit(str(error))
        except HydraException:
            problems = []  # of a kind that Hydra explains itself, e.g. of the command line's grammar
        if problems:
            sys.exit(str(ConfigError(problems)))
    for number in PREEMPTING:
        signal.signal(number, lambda *_: sys.exit(REQUEUE))
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
