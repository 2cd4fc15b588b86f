"""Configs of recipes, and their runs in the pool's processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from recipes import CONF, launch, record, work
from recipes.compose import resolved
from recipes.problem import Problem
from recipes.schema import world_size
from recipes.validate import validate
from tools.workers.pool import WorkerPool

QUIET = ["print_config=false", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "logger=none"]
NOWHERE = Path("/dev/null/run")  # of configs that tests only read: what writes there by mistake fails


@cache
def _of_options(*words: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[*words])


def composed(*overrides: str, folder: Path = NOWHERE) -> dict[str, Any]:
    """The config of a run in ``folder``, whose data are beside that. What the options of groups give, which takes Hydra
    most of the time, is composed once; values are then set as Hydra sets them."""
    parsed = OverridesParser.create().parse_overrides([f"paths.data_dir={folder.parent}/data", *overrides])
    groups = {path.name for path in CONF.iterdir()}
    values = [each for each in parsed if each.key_or_group not in groups and not each.is_hydra_override()]
    config = copy.deepcopy(_of_options(*(str(each.input_line) for each in parsed if each not in values)))
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return resolved(config, str(folder))


def attach(module: L.LightningModule, data: L.LightningDataModule) -> None:
    """To a Trainer that is about to run."""
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module.trainer.datamodule = data  # type: ignore[attr-defined]


def problems(*overrides: str) -> list[Problem | str]:
    return validate(composed(*overrides))


def refused(*overrides: str) -> str:
    """The only problem of a config, in words."""
    (problem,) = problems(*overrides)
    return str(problem)


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
