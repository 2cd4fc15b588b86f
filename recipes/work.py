"""What a worker does (``worker.py``): it trains, and tests if asked, and records how that ended."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import yaml
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.elastic.multiprocessing.errors import record as record_error

import lightning_parallel
from lightning_parallel.ranks import process_group
from lightning_parallel.ranks.collectives import gather_objects
from lightning_parallel.ranks.layout import AXES, Layout
from lightning_parallel.strategies.base import LayoutStrategy
from recipes import build, record, resume, trackers, using
from recipes.logs import ContinuedLogs
from recipes.processes import REQUEUE, restarts
from recipes.schema import world_size
from recipes.tables import write_csv

_JOB_IDS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")
_OWN = "recipes.launchers."  # launchers of this package are known by the names of their modules


def train(config: Mapping[str, Any]) -> None:
    """Train, and test if asked. It leaves ``metrics.json``, ``run.json``, logs and checkpoints in the run's folder."""
    folder = Path(config["paths"]["output_dir"])
    datamodule = build.data(config)
    path = resume.chosen(config)
    trackers.forget_runs(folder, path)
    own = [resume.SameStart(path), Recorder(folder), ContinuedLogs()]
    trainer = build.trainer(config, own)
    if trainer.is_global_zero:
        record.update_attempt(folder, resumed_from=path)
    resume.check(path)
    with build.disk_offload(trainer):
        model = build.model(config)
        if config["init_from"] is not None and path is None:
            build.begin_with(model, config["init_from"])
    if config.get("compile"):
        build.compile_layers(model)
    for logger in trainer.loggers:
        logger.log_hyperparams(dict(config))  # to compare runs by; Lightning adds the model's own
    trainer.fit(model, datamodule=datamodule, ckpt_path=path)
    if trainer.interrupted:
        raise KeyboardInterrupt("interrupted while training")
    metrics = dict(trainer.callback_metrics)
    if config["test"]:
        trainer.test(model, datamodule=datamodule)
        metrics.update(trainer.callback_metrics)
    if trainer.is_global_zero:
        record.complete(folder, metrics, steps=trainer.global_step)


def check(config: Mapping[str, Any]) -> None:
    """Compare a few updates with one process. ValueError: they differ, and not by nature."""
    layout: Any = build.strategy(config)
    if isinstance(layout, LayoutStrategy):  # else it is refused
        layout.cluster_environment = TorchElasticEnvironment()  # by itself Lightning may find SLURM
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    place = {"devices": local, "num_nodes": world_size(config) // local}
    options: dict[str, Any] = place | {key: config["trainer"][key] for key in ("precision", "accelerator")}
    found = lightning_parallel.check(build.model(config), build.data(config), strategy=layout, **options)
    if found is not None:
        print(found, flush=True)
        if found.largest is None or not (found.equal or found.by_nature):
            raise ValueError(str(found))
        record.complete(Path(config["paths"]["output_dir"]), {"largest_difference": found.largest.size})


def plan(config: Mapping[str, Any]) -> None:
    """Print which layouts fit, and what each will cost. ValueError: none fits."""
    options = config["plan"] | {key: config["trainer"][key] for key in ("precision", "gradient_clip_val")}
    options["devices"] = options["devices"] or config["cluster"]["devices"]
    found = lightning_parallel.plan(build.model(config), build.data(config), **options)
    print(found, flush=True)
    folder, records = Path(config["paths"]["output_dir"]), found.records()
    write_csv(folder / "plan.csv", [*records[0]] if records else [], records)
    best = found.best
    with suppress(ModuleNotFoundError):  # matplotlib
        found.draw(folder / "plan.png")
    rows = [{"overrides": row.overrides, "seconds": row.seconds, "bytes": row.memory.total} for row in found.found]
    (folder / record.PLAN).write_text(json.dumps({"best": best.overrides, "rows": rows}))
    record.complete(folder, {"seconds_per_step": best.seconds, "bytes": best.memory.total})


def run(config: Mapping[str, Any]) -> None:
    """Do the command that a config is for."""
    if config.get("as_pytorch_lightning"):
        import_module("lightning_parallel.as_pytorch_lightning")
    L.seed_everything(config["seed"], workers=True, verbose=False)
    COMMANDS[config.get("command", "train")](config)


COMMANDS: Mapping[str, Callable[[Mapping[str, Any]], None]] = MappingProxyType(
    {"train": train, "check": check, "plan": plan, "evaluate": using.evaluate, "generate": using.generate}
)


@record_error
def main(text: str) -> None:
    """Run a config's text. Whatever happens, ``run.json`` says how it ended.

    Raises:
        SystemExit: with :data:`REQUEUE`, after a signal of a scheduler. With a message, before anything is made, if
            there are not as many processes as the config is for.
    """
    _quiet()
    config: dict[str, Any] = yaml.safe_load(text)
    refuse_other_world(config)
    folder = Path(config["paths"]["output_dir"])
    rank = int(os.environ.get("RANK", "0"))
    first = rank == 0
    if first:
        said = record.read(folder)
        if not said or (said["status"] != record.STARTING and not restarts()):  # nobody else has
            folder.mkdir(parents=True, exist_ok=True)
            record.start(folder, config, choices={})
        begin(folder, config)
    try:
        run(config)
    except SIGTERMException:
        if first:
            record.end(folder, "preempted")
        sys.exit(REQUEUE)
    except BaseException as error:  # noqa: B036 (Ctrl-C too is recorded, and raised again)
        if isinstance(error, Exception):
            record.write_error(folder, rank, traceback.format_exc())
        if first:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            message = "".join(traceback.format_exception_only(error)).strip()
            record.end(folder, status, {"rank": 0, "message": message, "traceback": traceback.format_exc()})
        raise
    process_group.leave()  # Lightning's own strategies leave it to the end of the process


def refuse_other_world(config: Mapping[str, Any]) -> None:
    """Exit if torchrun has started more processes than the config is for, or fewer."""
    there, wanted = int(os.environ.get("WORLD_SIZE", "1")), world_size(config)
    config_file = Path(config["paths"]["output_dir"]) / record.CONFIG
    if there != wanted:
        sys.exit(
            f"{there} process{'es' * (there != 1)} started, but the config is for {wanted} "
            f"(cluster.devices={config['cluster']['devices']}): use torchrun --nproc-per-node={wanted} -m "
            f"recipes.worker {config_file}, or write the config anew with cluster.devices={there}"
        )


def _quiet() -> None:
    """Leave out hints of Lightning's that don't apply to the example data, and its advertising."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need to be provided.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    warnings.filterwarnings("ignore", message=".*`srun` command is available.*")  # recipes.train has its own way there
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda entry: not str(entry.msg).startswith(("💡", "Tip:"))
    )


def begin(folder: Path, config: Mapping[str, Any]) -> None:
    """Note that the workers have started. Rank 0 calls it."""
    target = str(config["cluster"]["_target_"])
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    record.begin_attempt(
        folder,
        engine=target.removeprefix(_OWN).split(".")[0] if target.startswith(_OWN) else target,
        job_id=next(filter(None, map(os.environ.get, _JOB_IDS)), None),
        rendezvous=f"{address}:{port}" if address and port else None,
        resumed_from=None,
    )


class Recorder(Callback):
    """Writes which rank is where and on what data, and from which step to which the attempt has come: at the latest
    when a checkpoint is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        mine = {
            "rank": trainer.global_rank,
            "host": socket.gethostname(),
            "device": str(trainer.strategy.root_device),
            "coordinates": coordinates(trainer),
        }
        ranks = gather_objects(mine, None)
        if trainer.is_global_zero:
            data = getattr(getattr(trainer, "datamodule", None), "fingerprint", None)
            record.update(self.folder, layout={"world_size": trainer.world_size, "ranks": ranks}, data=data)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, from_step=trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer, **more: int) -> None:
        if trainer.is_global_zero:
            with suppress(OSError):  # a full disk ends no run here, nor hides the error of one
                record.update_attempt(self.folder, to_step=trainer.global_step, **more)


def coordinates(trainer: L.Trainer) -> dict[str, int]:
    """This rank's place on every axis."""
    layout = getattr(trainer.strategy, "layout", None)
    if not isinstance(layout, Layout):  # of Lightning's strategies
        layout = Layout.resolve(trainer.world_size, trainer.global_rank, data=trainer.world_size)
    return {axis.name: layout.index(axis.name) for axis in AXES}
