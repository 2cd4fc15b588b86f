"""``run.json`` and ``metrics.json``: what was run, where, how it ended, and with which numbers."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from recipes import IN_CHECKOUT, ROOT
from recipes.processes import INTERRUPTED, REQUEUE

RUN, METRICS, CONFIG = "run.json", "metrics.json", "resolved.yaml"
TEXTS = "texts.jsonl"  # of a generation: a line for each prompt
PLAN = "plan.json"  # of a plan: the words of the layout that it takes, and what each layout costs
ERRORS = "errors"  # a folder: the traceback of each rank that failed
STARTING = "starting"  # status until a worker has begun
EXITS = {"completed": 0, "failed": 1, "preempted": REQUEUE, "interrupted": INTERRUPTED}  # codes of recipes.train
_PACKAGES = ("torch", "lightning", "torchmetrics", "hydra-core", "omegaconf", "lightning-parallel")


def now() -> str:
    """The time in UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash of a resolved config without its paths: equal for two runs of the same command."""
    content = {key: value for key, value in config.items() if key != "paths"}
    text = json.dumps(content, sort_keys=True, default=str).replace(str(config["paths"]["output_dir"]), "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # run from a checkout that is not installed
    return found


def _git(root: Path) -> dict[str, Any] | None:
    """The commit of a folder and whether files differ from it; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """A reader sees the old file or the new one, never half of one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    scratch.replace(path)


def environment() -> dict[str, Any]:
    """What a run depends on besides its config: versions of packages, the system, and a commit, of the checkout or,
    where this package is installed, of the folder from which the run is started."""
    root = ROOT if IN_CHECKOUT else Path.cwd()
    return {"versions": _versions(), "platform": platform.platform(), "git": _git(root)}


def start(
    folder: Path,
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    overrides: Sequence[str] | None = None,
    configs: Mapping[str, Any] | None = None,
) -> None:
    """Writes the part of ``run.json`` that is known before anything runs.

    Args:
        choices: the option of each group.
        overrides: of the command line; None where it isn't known.
        configs: where those of the user's own are; None where there are none.
    """
    shutil.rmtree(folder / ERRORS, ignore_errors=True)  # of an earlier run in this folder
    goes_on = config["resume"] is not None or config["ckpt_path"] is not None
    content = {
        "status": STARTING,
        "error": None,
        "started": now(),
        "ended": None,
        "task_name": config["task_name"],
        "tags": config["tags"],
        "argv": sys.argv,
        "overrides": None if overrides is None else list(overrides),
        "choices": dict(choices),
        "configs": None if configs is None else dict(configs),
        "config": CONFIG,
        "config_hash": config_hash(config),
        "seed": config["seed"],
        **environment(),
        "attempts": _killed(read(folder).get("attempts", [])) if goes_on else [],
    }
    _write(folder / RUN, content)


def read(folder: Path) -> dict[str, Any]:
    """``run.json``; empty where there is none that can be read."""
    try:
        content = json.loads((folder / RUN).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def started(folder: Path) -> float:
    """When the run's config was written, by the clock of the disk: seconds since the epoch; 0 where it isn't there."""
    file = folder / CONFIG
    return file.stat().st_mtime if file.exists() else 0.0


def is_of(folder: Path, config: Mapping[str, Any]) -> bool:
    """Does the record in a folder belong to this config, whatever its paths are?"""
    return read(folder).get("config_hash") == config_hash(config)


def begin_attempt(folder: Path, **known: Any) -> None:
    """Adds a start of the workers. The one before, if it has no end, was killed."""
    before = _killed(read(folder).get("attempts", []))
    new = {"started": now(), "ended": None, "reason": None, "exit": None, "from_step": None, "to_step": None}
    more = {"status": "running", "error": None, "ended": None, "pruned_at": None}
    update(folder, attempts=[*before, {**new, **known}], **more)


def update_attempt(folder: Path, **fields: Any) -> None:
    """Sets fields of the last attempt."""
    attempts = read(folder).get("attempts", [])
    if attempts:
        update(folder, attempts=[*attempts[:-1], {**attempts[-1], **fields}])


def _killed(attempts: list[Any]) -> list[Any]:
    """The attempts, the last of which was killed if nobody has written how it ended."""
    if not attempts or attempts[-1]["reason"] is not None:
        return attempts
    return [*attempts[:-1], {**attempts[-1], "reason": "killed"}]


def update(folder: Path, **fields: Any) -> None:
    """Sets fields of ``run.json``. One process at a time: rank 0 while workers run, then the launcher."""
    _write(folder / RUN, {**json.loads((folder / RUN).read_text()), **fields})


def end(folder: Path, status: str, error: Mapping[str, Any] | None = None) -> None:
    """Sets how the run ended: ``completed``, ``failed``, ``preempted`` or ``interrupted``.

    The launcher, which knows of all ranks, corrects what rank 0 has said.
    """
    reason = status if error is None else f"rank {error['rank']}: {(str(error['message']).splitlines() or [''])[0]}"
    if read(folder).get("status") == STARTING:  # no worker has begun
        begin_attempt(folder)
    update_attempt(folder, ended=now(), reason=reason, exit=EXITS[status])
    update(folder, status=status, error=dict(error) if error is not None else None, ended=now())


def write_error(folder: Path, rank: int, text: str) -> None:
    """Keeps the traceback of a rank that failed. A full disk must not hide the error itself."""
    with suppress(OSError):
        (folder / ERRORS).mkdir(parents=True, exist_ok=True)
        (folder / ERRORS / f"rank-{rank}.txt").write_text(text)


def place(folder: Path, rank: int) -> str:
    """Where a rank is on the axes of the run's layout, in words; empty where that isn't recorded, or there is one."""
    try:
        ranks = json.loads((folder / RUN).read_text())["layout"]["ranks"]
        mine = next(each["coordinates"] for each in ranks if each["rank"] == rank)
    except (OSError, ValueError, LookupError, StopIteration):
        return ""
    sizes = {axis: 1 + max(each["coordinates"][axis] for each in ranks) for axis in mine}
    words = {"pipeline": "stage", "data": "replica", "tensor": "tensor rank"}
    return ", ".join(f"{words[axis]} {mine[axis]} of {sizes[axis]}" for axis in words if sizes.get(axis, 1) > 1)


def write_metrics(folder: Path, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Writes ``metrics.json``: name -> number, or null for a value that is not finite (JSON has none)."""
    numbers = {name: float(value) for name, value in metrics.items()}
    finite = {name: value if math.isfinite(value) else None for name, value in sorted(numbers.items())}
    _write(folder / METRICS, finite)
    return finite


def complete(folder: Path, metrics: Mapping[str, Any], **fields: Any) -> None:
    """Ends a run that is complete, with its metrics."""
    update(folder, **fields, metrics=write_metrics(folder, metrics))
    end(folder, "completed")


def read_metrics(folder: Path) -> dict[str, float | None]:
    return dict(json.loads((folder / METRICS).read_text()))


def read_config(folder: Path, new: Path | None = None) -> dict[str, Any]:
    """The resolved config of a run, whose folder may have been moved, with its paths in ``new`` if that is given.

    Raises:
        ValueError: there is none.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise ValueError(f"{folder} is no folder of a run: it has no {CONFIG}.")
    recorded = yaml.safe_load(file.read_text())
    config: dict[str, Any] = _moved(recorded, recorded["paths"]["output_dir"], str(new or folder.resolve()))
    return config


def _moved(value: Any, old: str, new: str) -> Any:
    """A config in which paths in a folder are in another one."""
    if isinstance(value, Mapping):
        return {key: _moved(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, old, new) for item in value]
    inside = isinstance(value, str) and (value == old or value.startswith(f"{old}/"))
    return new + value[len(old) :] if inside else value
