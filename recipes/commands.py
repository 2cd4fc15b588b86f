"""What comes after training: a run's model is used, under the run's layout or another one.

Such a command is a run of its own, in a folder inside the first one's. It has the same config, but for what the command
line says, and begins with the weights of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydra import compose, initialize_config_dir

from recipes import record
from recipes.compose import CONF, check, resolved
from recipes.launch import launch, write
from recipes.problem import ConfigError


def run_on(
    command: str, run: Path, overrides: Sequence[str], checkpoint: Path | None, more: Mapping[str, Any]
) -> tuple[Path, dict[str, float | None]]:
    """Start the workers that do a command with a run's model, and wait for them.

    Args:
        command: a key of :data:`recipes.work.COMMANDS`.
        run, overrides, checkpoint, more: see :func:`config_of`.

    Returns:
        The folder of what the command did, and its numbers.

    Raises:
        ConfigError: there is no such run or checkpoint, or the config can't be run here.
        WorkersFailed: a worker failed.
    """
    from recipes.validate import validate  # here: it imports torch

    folder = run.resolve() / command / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    config = config_of(command, run.resolve(), folder, overrides, checkpoint, more)
    problems = validate(config)
    if problems:
        raise ConfigError(problems)
    folder.mkdir(parents=True)
    write(config)
    metrics = launch(config, record.read(run).get("choices", {}), list(overrides))
    return folder, metrics or {}


def config_of(
    command: str,
    run: Path,
    folder: Path,
    overrides: Sequence[str] = (),
    checkpoint: Path | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The config of a command with a run's model.

    Args:
        command: a key of :data:`recipes.work.COMMANDS`.
        run: the folder of the run.
        folder: of what the command does.
        overrides: of the run's config: ``strategy=single``, ``data.batch_size=4``.
        checkpoint: of the run; None for its newest one.
        more: top-level keys of the config.

    Raises:
        ConfigError: there is no such run or checkpoint, or an override isn't known.
    """
    from recipes import resume  # here: it imports torch

    try:
        found = str(checkpoint.resolve()) if checkpoint else resume.newest(record.read_config(run))
        if found is None:
            raise ValueError(f"{run} has no whole checkpoint: give one with --checkpoint.")
        config = record.read_config(run, folder)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    config |= _changed(run, overrides, folder)
    only_weights = found.endswith(".safetensors")
    begins = {
        "init_from": found if only_weights else None,
        "ckpt_path": None if only_weights else found,
        "resume": None,
    }
    return config | begins | {"command": command, "timeline": False, "callbacks": {}, **more}


def _changed(run: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """The nodes of the config that a command line concerns, as they would be with the run's own one before it.

    Raises:
        ConfigError: a key or a value isn't known, or the run's own command line isn't.
    """
    if not overrides:
        return {}
    own = record.read(run).get("overrides")
    if own is None:
        words = " ".join(overrides)
        raise ConfigError([f"{run} doesn't say how it was started, so its config can't be changed: leave out {words}"])
    line = [*own, *overrides]
    wrong = check(line)
    if wrong:
        raise ConfigError(wrong)
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="command"):
        composed = resolved(compose("train", overrides=line), str(folder))
    concerned = {override.lstrip("+~").split("=")[0].split(".")[0] for override in overrides}
    return {key: composed[key] for key in concerned if key in composed}
