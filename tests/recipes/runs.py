"""Runs of recipes in the pool's processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import launch, record, work
from recipes.schema import world_size
from recipes.validate import validate
from tests.recipes.test_configs import composed
from tools.workers.pool import WorkerPool

QUIET = ["print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "logger=none"]


def done(pool: WorkerPool, config: Mapping[str, Any]) -> Path:
    """Run a config. Returns its folder."""
    folder = Path(config["paths"]["output_dir"])
    assert validate(config) == []
    folder.mkdir(parents=True, exist_ok=True)
    launch.write(config)
    pool.run(work.main, world_size(config), (folder / record.CONFIG).read_text(), init=False)
    return folder


def in_the_pool(
    pool: WorkerPool, config: Mapping[str, Any], overrides: Sequence[str] | None
) -> dict[str, float | None]:
    """In the place of ``recipes.launch.launch``, for commands that come after a run. Returns the numbers."""
    folder = done(pool, config)
    record.update(folder, overrides=overrides)
    return record.read_metrics(folder)


def trained(pool: WorkerPool, folder: Path, *overrides: str) -> Path:
    """Run a command line in a folder, which is returned, with its record of that command line."""
    line = [*QUIET, *overrides]
    config = composed(*line, folder=folder)
    done(pool, config)
    record.update(folder, overrides=[*line, f"paths.data_dir={config['paths']['data_dir']}"])
    return folder
