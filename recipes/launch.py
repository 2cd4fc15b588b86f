"""Starts a run whose config is known, waits for its end, and records how that was."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from recipes import record
from recipes.launchers.launcher import LeftAlone, Preempted, WorkersFailed
from recipes.processes import REQUEUE

log = logging.getLogger(__name__)


def write(config: Mapping[str, Any]) -> Path:
    """Write a resolved config into its run's folder. Returns the file."""
    file = Path(config["paths"]["output_dir"]) / record.CONFIG
    file.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    return file


def launch(
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    overrides: Sequence[str] | None,
    configs: Mapping[str, Any] | None = None,
) -> dict[str, float | None] | None:
    """Start the workers of a run, whose config has been written; what else ``run.json`` has of it is passed on.

    Returns:
        The run's metrics; None where it goes on elsewhere.

    Raises:
        WorkersFailed: a worker failed.
        KeyboardInterrupt: by Ctrl-C.
        SystemExit: with :data:`REQUEUE`, after a signal of a scheduler.
    """
    from recipes.build import launcher  # here: they import torch
    from recipes.schema import world_size

    folder = Path(config["paths"]["output_dir"])
    record.start(folder, config, choices, overrides, configs)
    try:
        left = launcher(config).launch(folder / record.CONFIG, world_size(config))
    except WorkersFailed as error:
        record.end(folder, "failed", error.failure.as_dict())
        tracebacks = folder / record.ERRORS
        log.error("failed; for details see %s", tracebacks if tracebacks.exists() else folder / record.RUN)
        raise
    except Preempted:
        record.end(folder, "preempted")
        log.warning("preempted: saved as far as it had come; go on with hydra.run.dir=%s resume=auto", folder)
        sys.exit(REQUEUE)
    except LeftAlone as said:
        log.warning("%s", said)
        raise
    except KeyboardInterrupt:
        record.end(folder, "interrupted")
        log.error("interrupted; see %s", folder)
        raise
    if left is not None:
        log.info("%s", left)
        return None
    metrics = record.read_metrics(folder)
    log.info("%s", "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None))
    log.info("done; see %s", folder)
    return metrics
