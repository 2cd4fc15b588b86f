"""``python -m recipes.rerun RUN``: repeats a run from its record, and says what differs.

::

    python -m recipes.rerun logs/train/runs/2026-11-23_04-26-12-951180

The new run has the recorded config, in a folder beside the old one. Code, versions and machine are those of today: what
they differ in is told before it starts, data and metrics at its end.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from recipes import record
from recipes.command_line import as_command, typed
from recipes.launch import launch, write
from recipes.problem import ConfigError
from recipes.processes import joined

log = logging.getLogger(__name__)


def again(folder: Path, new: Path) -> dict[str, Any]:
    """The config of a recorded run, for a new folder. It starts from the beginning, as the recorded one once did."""
    if not (folder / record.CONFIG).is_file() or not record.read(folder):
        raise ConfigError([f"{folder} is no folder of a run: it has no {record.RUN} and {record.CONFIG}"])
    config = record.read_config(folder, new)
    if config["ckpt_path"] == "last":
        config["ckpt_path"] = None
    return config


def beside(folder: Path) -> Path:
    """A folder for one more run: the first that isn't there."""
    return next(path for number in count(1) if not (path := folder.with_name(f"{folder.name}-again-{number}")).exists())


def differences(old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]) -> Iterator[str]:
    """What two records don't agree in, a line each: values under some keys, or in dictionaries there."""
    for key in keys:
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from (f"{key}.{line}" for line in differences(before, now, list({**before, **now})))
        elif before != now:
            yield f"{key}: {before} then, {now} now"


def rerun(folder: Path) -> list[str]:
    """Repeat a run. Returns what its record and the new one don't agree in.

    Raises:
        ConfigError: there is no such record, or its config can't be run here.
    """
    from recipes.validate import validate  # here: it imports torch

    if joined():
        raise ConfigError(["several processes have been started; call this without torchrun"])
    new = beside(folder)
    config = again(folder, new)
    problems = validate(config)
    if problems:
        raise ConfigError(problems)
    recorded = record.read(folder)
    new.mkdir()
    write(config)
    code = list(differences(recorded, record.environment(), ["versions", "platform", "git"]))
    for line in code:
        log.warning("differs: %s", line)
    if launch(config, recorded["choices"], recorded.get("overrides"), recorded.get("configs")) is None:
        return code
    found = list(differences(recorded, record.read(new), ["data", "steps", "metrics"]))
    for line in found:
        log.warning("differs: %s", line)
    if not found:
        log.info("the same data, steps and metrics as recorded")
    return code + found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog=typed("rerun"), description="Repeat a run from its record.")
    parser.add_argument("run", type=Path, help="the folder of a run")
    given = parser.parse_args(arguments)
    with as_command():
        rerun(given.run.absolute())


if __name__ == "__main__":
    main()
