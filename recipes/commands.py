"""A run's model is used: ``recipes.evaluate``, ``recipes.generate``.

Such a command is a run of its own, in a folder inside the first one's. It has the same config, but for what the command
line says, and begins with the weights of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from hydra.errors import HydraException

from recipes import record
from recipes.compose import composed, resolved, unknown
from recipes.configs import Configs
from recipes.launch import launch, write
from recipes.problem import NOT_KNOWN, ConfigError

_IDLE = (  # they change nothing in a command
    "callbacks", "ckpt_path", "command", "compile", "generation", "hydra", "init_from", "launch", "resume", "test",
    "timeline",
)  # fmt: skip


def run_on(command: str, run: Path, overrides: Sequence[str], checkpoint: Path | None, more: Mapping[str, Any]) -> Path:
    """Start the workers that do a command, a key of :data:`recipes.work.COMMANDS`, with a run's model, and wait for
    them. Returns the folder of what they did. The arguments are those of :func:`config_of`.

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
    launch(config, record.read(run).get("choices", {}), list(overrides))
    return folder


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
        overrides: changes of the run's config, as ``strategy=single``.
        checkpoint: of the run; None for its newest one.
        more: top-level keys of the config.

    Raises:
        ConfigError: there is no such run or checkpoint, or an override isn't known.
    """
    from recipes import resume  # here: it imports torch

    if checkpoint is not None and not checkpoint.exists():
        raise ConfigError([f"--checkpoint={checkpoint}: no such checkpoint."])
    try:
        config, moved = record.read_config(run), record.read_config(run, folder)
        found = str(checkpoint.resolve()) if checkpoint else resume.newest(config)
        if found is None:
            raise ValueError(f"{run} has no whole checkpoint: give one with --checkpoint.")
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if overrides:
        config = _changed(config, run, overrides)
    config["paths"]["output_dir"], config["logger"] = str(folder), moved["logger"]
    only_weights = found.endswith(".safetensors")
    config |= {"init_from": found if only_weights else None, "ckpt_path": None if only_weights else found}
    return config | {"command": command, "resume": None, "timeline": False, "callbacks": {}, **more}


def _changed(config: Mapping[str, Any], run: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """A run's config with what a command line changes in it: the difference that it makes to the run's own one.

    Raises:
        ConfigError: an option isn't known, a value changes nothing here, or the run's own command line isn't known.
    """
    own = record.read(run).get("overrides")
    if own is None:
        words = " ".join(overrides)
        raise ConfigError([f"{run} doesn't say how it was started, so its config can't be changed: leave out {words}"])
    chosen = tuple(word.partition("=")[0] + "." for word in overrides)
    own = [word for word in own if not word.startswith(chosen)]  # another option of a group has keys of its own
    idle = [word for word in overrides if word.lstrip("+~").split("=")[0].split(".")[0] in _IDLE]
    if idle:
        raise ConfigError([f"{word}: it changes nothing here; leave it out" for word in idle])
    try:
        configs = Configs.of_record(record.read(run).get("configs"))
        wrong = unknown([*own, *overrides], configs)
        if wrong:
            raise ConfigError(wrong)
        with configs.opened():
            # The classes stay the run's, whatever the images.
            lines = (own, [*own, *overrides])
            before, after = (resolved(composed(line, configs), NOT_KNOWN, look_at_data=False) for line in lines)
    except ConfigError:
        raise
    except (HydraException, yaml.YAMLError) as error:
        raise ConfigError([str(error)]) from error
    return dict(_with_difference(config, before, after))


def _with_difference(value: Any, before: Any, after: Any) -> Any:
    """A value, changed as ``after`` differs from ``before``."""
    if before == after:
        return value
    if not (isinstance(value, Mapping) and isinstance(before, Mapping) and isinstance(after, Mapping)):
        return after
    kept = {key: item for key, item in value.items() if key in after or key not in before}
    changed = {key: item for key, item in after.items() if key not in before or before[key] != item}
    return kept | {key: _with_difference(value.get(key), before.get(key), item) for key, item in changed.items()}
