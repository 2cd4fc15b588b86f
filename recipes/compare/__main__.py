"""The command line: ``python -m recipes.compare [strategies=[...]] [GROUP=OPTION ...] [KEY=VALUE ...]``."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException, HydraException

from recipes.command_line import typed
from recipes.compare.run import REFERENCE, STRATEGIES, Outcome, configs, plan, run
from recipes.compose import check
from recipes.configs import Configs
from recipes.problem import ConfigError, Problem, closest

_HELP = """\
Run one model and its data under several strategies, one after the other, each in fresh processes, and write a report:
tables here, compare.md and compare.csv in a folder.

    {compare} [strategies=[NAME,...]] [output=FOLDER] [GROUP=OPTION ...] [KEY=VALUE ...]

Its own
    strategies=[...]   default: {strategies[0]},
                       {strategies[1]}
                       ({reference}, one process, is always measured first: efficiencies are against it)
    output=FOLDER      default: logs/compare/<time>; must not exist
    --config-dir DIR   a folder with configs of your own

Groups and values of recipes.train ({train} --help)
    model=gpt  data=stdlib  cluster.devices=2  trainer.max_steps=30 (the default here)  data.batch_size=24
    strategy.KEY=VALUE   for those of the strategies that have KEY

Examples
    {compare}
    {compare} strategies=[ddp,fully_sharded] cluster.devices=4
    {compare} model=mlp data=digits trainer.max_steps=100

What is measured
    step time       median and quartiles of the updates after a warm-up, beside what recipes.plan predicts
    memory          peak of each rank; parameters, gradients and optimizer state exactly
    messages        bytes that a rank sends, by kind, in the last two updates
    bubble          of pipelines: share of the stages' time without compute, beside theory
    loss            after the last update, on the validation set

Figures of strategies can be compared on a machine that does nothing else.
"""
_STEPS = 30


def compare(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=typed("compare"),
        usage=argparse.SUPPRESS,
        description=_HELP.format(
            compare=typed("compare"),
            train=typed("train"),
            reference=REFERENCE,
            strategies=(",".join(STRATEGIES[:4]), ",".join(STRATEGIES[4:])),
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--config-dir", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments, argparse.Namespace(config_name=None))
    words: list[str] = given.overrides
    own = Configs.of_command_line(argparse.Namespace(**{**vars(given), "overrides": []}))
    strategies, folder, overrides = _options(words, own)
    # What concerns some strategies only is told in their rows.
    problems = check([word for word in overrides if not word.startswith("strategy.")], configs=own)
    if problems:
        raise ConfigError(problems)
    planned = list(configs(overrides, strategies, folder, own))
    folder.mkdir(parents=True)
    try:
        _compare(planned, folder, words)
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise


def _options(words: Sequence[str], own: Configs) -> tuple[list[str], Path, list[str]]:
    """The strategies, the folder, and what is left for ``recipes.train``."""
    strategies, output = list(STRATEGIES), Path("logs", "compare", time.strftime("%Y-%m-%d_%H-%M-%S"))
    rest: list[str] = []
    for word, parsed in zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True):
        if parsed.key_or_group == "strategies":
            value = parsed.value()
            strategies = [str(name) for name in (value if isinstance(value, list) else [value])]
        elif parsed.key_or_group == "output":
            output = Path(str(parsed.value()))
        elif parsed.key_or_group == "strategy":
            raise ConfigError([Problem("strategy", parsed.value(), "several are compared", "use strategies=[...]")])
        elif parsed.key_or_group.startswith("hydra."):
            fix = f"use output={parsed.value()}" if parsed.key_or_group == "hydra.run.dir" else "leave it out"
            raise ConfigError([Problem(parsed.key_or_group, parsed.value(), "Hydra runs nothing here", fix)])
        else:
            rest.append(word)
    known = own.options()["strategy"]
    wrong = [
        Problem("strategies", name, "no such strategy", closest(name, known))
        for name in strategies
        if name not in known
    ]
    if output.exists():
        wrong.append(Problem("output", output, "is there already", "give a folder that is not"))
    if not any(word.startswith("trainer.max_steps=") for word in rest):
        rest.insert(0, f"trainer.max_steps={_STEPS}")
    if wrong:
        raise ConfigError(wrong)
    return [REFERENCE, *(name for name in dict.fromkeys(strategies) if name != REFERENCE)], output.absolute(), rest


def _compare(planned: Sequence[Outcome], folder: Path, words: Sequence[str]) -> None:
    outcomes, predicted = [], plan(planned[0])
    for number, each in enumerate(planned, 1):
        print(f"[{number}/{len(planned)}] {each.strategy} ...", end="", flush=True)
        begin = time.monotonic()
        outcomes.append(run(each))
        print(f" {outcomes[-1].error or f'{time.monotonic() - begin:.0f} s'}", flush=True)
    config = next((outcome.config for outcome in outcomes if outcome.error is None), None)
    if config is None:
        sys.exit("nothing could be measured")

    from recipes.compare import report, rows  # here: they import torch, for which --help need not wait

    table = rows.rows(outcomes, predicted)
    head = report.headline(config, words)
    found = report.tables(table, str(config["optimized_metric"] or "train_loss"))
    print(f"\n{report.show(head, table, found)}")
    report.write(folder, head, table, found)
    print(f"\nWritten: {folder}/compare.md and compare.csv")


def main() -> None:
    """The program: as :func:`compare`, but what is wrong ends it with a message instead of a traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C: no worker is left
    try:
        compare()
    except KeyboardInterrupt:
        sys.exit(130)
    except (CompactHydraException, HydraException) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
