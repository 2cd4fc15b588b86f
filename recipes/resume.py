"""Which checkpoint a run goes on from: ``ckpt_path``, or with ``resume=auto`` the newest one in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parallel.checkpoint import is_whole, newest_in
from lightning_parallel.checkpoint.directory import check_archive, found_in, saved_at
from lightning_parallel.ranks.collectives import gather_objects
from recipes import record
from recipes.processes import restarts

Config = Mapping[str, Any]

LAST = "last"  # a value of ckpt_path


def chosen(config: Config) -> str | None:
    """The path of the checkpoint to resume from; None for a fresh start."""
    asked = config["resume"] == "auto" or config["ckpt_path"] == LAST
    if not asked and not restarts():
        return config["ckpt_path"]  # type: ignore[no-any-return]
    # Of a run that an engine starts again, an earlier run in its folder is no part.
    found = newest(config, since=None if asked else record.started(Path(config["paths"]["output_dir"])))
    chosen = found or (config["ckpt_path"] if config["ckpt_path"] != LAST else None)
    damaged = _damaged_since(config, Path(found) if found else None)
    if damaged:
        goes_on = f"from {chosen}" if chosen else "afresh"
        rank_zero_warn(f"Not whole, so it goes on {goes_on}: {', '.join(map(str, damaged))}.")
    return chosen


def would_overwrite(config: Config) -> bool:
    """Is there an earlier run in the folder of one that begins?"""
    if config["resume"] is not None or config["ckpt_path"] is not None or restarts():
        return False
    folder = Path(config["paths"]["output_dir"])
    return newest(config) is not None or record.read(folder).get("status") == "completed"


def check(path: str | None) -> None:
    """Refuse a damaged file with a ValueError that names it, and the newest whole checkpoint beside it. The strategies
    look at directories, and at the part that each rank reads."""
    if path is not None and Path(path).is_file():
        check_archive(Path(path), Path(path))


class SameStart(Callback):
    """Ends a run whose ranks would go on from different checkpoints, with a RuntimeError on all of them before the
    first batch. Each looks into the run's folder by itself, and storage that machines share may show a file to one of
    them later than to another."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            _same("checkpoint", self._path)

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # Of one path there may be an earlier version. Later hooks aren't called where it is the last step's.
        _same("step", checkpoint["global_step"])


def _same(what: str, mine: str | int | None) -> None:
    all_ranks = gather_objects(mine, None)
    other = next((rank for rank, value in enumerate(all_ranks) if value != all_ranks[0]), None)
    if other is not None:
        found = f"rank 0 begins with {what} {all_ranks[0]}, rank {other} with {all_ranks[other]}"
        raise RuntimeError(f"{found}: the run's folder is not the same on all machines yet; start the run again.")


def newest(config: Config, since: float | None = None) -> str | None:
    """The newest whole checkpoint that the run's callbacks have saved in its folder since a time (seconds since the
    epoch); None for none."""
    found = newest_in(_folders(config), since=since)
    return None if found is None else str(found)


def _damaged_since(config: Config, path: Path | None) -> list[Path]:
    """The run's checkpoints that are not whole, and newer than ``path`` if that exists."""
    since = saved_at(path) if path is not None else 0
    return sorted(other for other in found_in(_folders(config)) if saved_at(other) > since and not is_whole(other))


def _folders(config: Config) -> set[Path]:
    """Where callbacks save, those left out in which only weights are saved."""
    default = Path(config["paths"]["output_dir"]) / "checkpoints"
    every, whole, weights = set[Path](), set[Path](), set[Path]()
    for node in config["callbacks"].values():
        if isinstance(node, Mapping):
            folder = Path(node.get("dirpath") or default)
            every.add(folder)  # a callback with another name may save whole checkpoints too
            if is_model_checkpoint(node):
                (weights if node.get("save_weights_only") else whole).add(folder)
    return every - weights | whole


def is_model_checkpoint(node: object) -> bool:
    """Is a callback's config that of a ModelCheckpoint, as far as its name tells?"""
    return isinstance(node, Mapping) and str(node.get("_target_")).endswith("ModelCheckpoint")
