"""Objects from a resolved config: launcher, data, model, strategy, loggers, callbacks, Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint, LearningRateMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

from lightning_parallel import ExactResume, FiniteLoss, Preemption
from lightning_parallel.checkpoint import read_full
from lightning_parallel.set_up.part_of_model import configure_part
from lightning_parallel.strategies.base import LayoutStrategy
from lightning_parallel.strategies.data_parallel import DataParallelStrategy
from recipes.examples import DATA, MODELS
from recipes.launchers.launcher import Launcher
from recipes.schema import DDP, kind_of

Config = Mapping[str, Any]
_WAIT, _WARM_UP, _TRACED = 1, 1, 3  # batches
_MADE_LATER = ("optimizer", "scheduler")


def built(node: Mapping[str, Any]) -> Any:
    """What a node with ``_target_`` describes. If the class refuses it, its own error is raised, not Hydra's."""
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError | MisconfigurationException):
            raise error.__cause__ from None
        raise


def launcher(config: Config) -> Launcher:
    """The launcher of the run's workers. Where ``gpus`` or ``cpus`` are ``auto``, they are what the workers need."""
    node, alone = dict(config["cluster"]), config["strategy"]["_target_"] is None
    on_cpus = config["trainer"]["accelerator"] == "cpu"
    if node.get("gpus") == "auto":
        node["gpus"] = None if on_cpus else 1 if alone else node["devices"]
    if node.get("cpus") == "auto":
        node["cpus"] = node["threads"] + config["data"].get("workers", 0)
    chosen: Launcher = built(node)
    return chosen


def data(config: Config) -> L.LightningDataModule:
    """The example data named by ``data.name``, or the user's own ``data._target_``."""
    node = dict(config["data"])
    if node.get("_target_") is not None:
        module = built(node)
    else:
        module = get_class(DATA[node.pop("name")].target)(**node, seed=config["seed"])
    if not isinstance(module, L.LightningDataModule):
        raise ValueError(f"data._target_={node['_target_']} is not a LightningDataModule: give one")
    return module


def model(config: Config) -> L.LightningModule:
    """The example model named by ``model.name``, or the user's own ``model._target_``.

    The example models get the optimizer and scheduler nodes; a class of the user's own may take them too.
    """
    node = dict(config["model"])
    if node.get("_target_") is not None:
        target = get_class(node.pop("_target_"))
        # These two are passed on as dictionaries, not built: they need the model's parameters. Functions don't yet.
        passed = {key: node.pop(key) for key in _MADE_LATER if key in node and "_partial_" not in (node[key] or {})}
        module = target(**built(node), **passed)
    else:
        target = get_class(MODELS[node.pop("name")].target)
        module = target(**node, optimizer=config["optimizer"], scheduler=config["scheduler"])
    if not isinstance(module, L.LightningModule):
        raise ValueError(f"model._target_={config['model']['_target_']} is not a LightningModule: give one")
    return module


def compile_layers(module: L.LightningModule) -> None:
    """Compile each layer of a list by itself, in place, so that names and cuts stay. ValueError: there is no list."""
    lists = torch.nn.ModuleList
    children = [each for part in module.modules() if isinstance(part, lists) for each in part]
    found = [each for each in children if each is not None and not isinstance(each, lists)]  # lists are never called
    inside = {id(part) for layer in found for part in layer.modules() if part is not layer}
    if not found:
        raise ValueError("compile=true: the model has no nn.ModuleList of layers: call compile() inside the module.")
    outer = [layer for layer in found if id(layer) not in inside]
    for layer in outer:
        layer.compile()
    rank_zero_info(f"compile=true: the first step compiles {len(outer)} layers, which may take minutes.")


def disk_offload(trainer: L.Trainer) -> AbstractContextManager[Any]:
    """Inside, a model is made without holding the whole of it in memory, where the strategy divides it."""
    return trainer.strategy.disk_offload if isinstance(trainer.strategy, LayoutStrategy) else nullcontext()


def begin_with(module: L.LightningModule, path: str, setting: str = "init_from") -> None:
    """Give a whole model the weights of a checkpoint of any kind, which a setting has named.

    Raises:
        ValueError: they are those of another model.
    """
    configure_part(module)
    try:
        module.load_state_dict(read_full(path))
    except RuntimeError as error:
        first, *others = str(error).split("\n\t")[1:] or [str(error)]
        more = f" (and {len(others)} more)" if others else ""
        raise ValueError(f"{setting}={path}: its weights are those of another model: {first}{more}") from error


def strategy(config: Config) -> Strategy | str:
    """The strategy object; ``"auto"`` for a single process, for which Lightning chooses by accelerator."""
    if config["strategy"]["_target_"] is None:
        return "auto"
    node = dict(config["strategy"])
    if kind_of("strategy", node) is DDP and isinstance(node.get("timeout"), int | float):
        node["timeout"] = timedelta(seconds=node["timeout"])  # Lightning's strategy knows no other kind
    chosen: Strategy = built(node)
    return chosen


def loggers(config: Config) -> list[Logger]:
    return [built(node) for node in config["logger"].values() if node is not None]


def callbacks(config: Config) -> list[Callback]:
    """The configured ones; without progress bars when ``trainer.enable_progress_bar=false``."""
    chosen: list[Callback] = [built(node) for node in config["callbacks"].values() if node is not None]
    if not config["trainer"]["enable_progress_bar"]:
        chosen = [callback for callback in chosen if not isinstance(callback, L.pytorch.callbacks.ProgressBar)]
    if not any(config["logger"].values()):
        chosen = [callback for callback in chosen if not isinstance(callback, LearningRateMonitor)]  # it would refuse
    return chosen


def validation_interval(max_steps: int, accumulate: int) -> int | None:
    """Batches between validations such that the last one is at the end of the run.

    At most four validations, as many as divide the run evenly. None if the length is given in epochs: one an epoch.
    """
    if max_steps < 1:
        return None
    parts = next(parts for parts in (4, 3, 2, 1) if max_steps % parts == 0)
    return max_steps // parts * accumulate


def shared_gpus(processes: int, gpus: int) -> list[torch.device]:
    """The GPU of each process (or replica) where there are fewer GPUs than processes, in turn; empty where none is
    shared.
    """
    return [torch.device("cuda", rank % gpus) for rank in range(processes)] if 0 < gpus < processes else []


def trainer(config: Config, extra_callbacks: Sequence[Callback] = ()) -> L.Trainer:
    """The Trainer of this process, one of the workers that the launcher (or torchrun) started."""
    options = dict(config["trainer"])
    profiler, folder = options.pop("profiler", None), Path(config["paths"]["output_dir"]) / "profile"
    if options["val_check_interval"] == "auto":
        options["val_check_interval"] = validation_interval(options["max_steps"], options["accumulate_grad_batches"])
    # Counted over the whole run: an epoch may be shorter than the interval.
    options["check_val_every_n_epoch"] = 1 if options["val_check_interval"] is None else None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    chosen = strategy(config)
    devices = config["cluster"]["devices"] if isinstance(chosen, DataParallelStrategy) else local
    if isinstance(chosen, LayoutStrategy | DataParallelStrategy) and options["accelerator"] != "cpu":
        shared = shared_gpus(devices, torch.cuda.device_count())
        if shared:
            chosen.parallel_devices = shared
            devices = torch.cuda.device_count()  # what Lightning checks; the strategy's list is what it uses
    plugins = [built(node) for node in options.pop("plugins", None) or []]
    if "RANK" in os.environ:  # by itself Lightning finds SLURM, whose signals it would answer in its own way
        plugins.append(TorchElasticEnvironment())
    attached = [*callbacks(config), *extra_callbacks]
    if not any(isinstance(callback, FiniteLoss) for callback in attached):
        attached.insert(0, FiniteLoss() if config["on_nan"] == "stop" else FiniteLoss(stop_after=None))
    if profiler == "pytorch":
        attached.append(TraceOfSteps(folder))
    attached = [Preemption(), ExactResume(), *attached]  # for Lightning's strategies, too
    return L.Trainer(
        **options,
        profiler=profiler_named(profiler, folder, int(os.environ.get("RANK", 0))),
        devices=devices,
        num_nodes=int(os.environ.get("WORLD_SIZE", 1)) // local,
        strategy=chosen,
        plugins=plugins,
        logger=loggers(config),
        callbacks=attached,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in attached),
        default_root_dir=config["paths"]["output_dir"],
    )


class TraceOfSteps(Callback):
    """Writes torch's trace of the third to the fifth training batch, ``trace_rank0.json`` and so on: of fewer, if
    training ends before. Lightning's own profiler ends its trace at a validation, and hooks the modules, which in a
    pipeline don't run to their ends. Stages that are ahead of others drain before the first of these batches and after
    the last."""

    reads_weights = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profile: profile | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path = self._folder / f"trace_rank{trainer.global_rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=_WAIT, warmup=_WARM_UP, active=_TRACED, repeat=1),
            on_trace_ready=lambda traced: traced.export_chrome_trace(str(path)),
        )
        self._profile.start()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._profile is None:
            return
        # A message that is under way when torch's profiler begins or ends may crash the process.
        turns = self._profile.step_num + 1 in (_WAIT, _WAIT + _WARM_UP, _WAIT + _WARM_UP + _TRACED)
        if turns and isinstance(trainer.strategy, LayoutStrategy):
            trainer.strategy.drain()
        self._profile.step()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._profile is None:
            return
        if isinstance(trainer.strategy, LayoutStrategy):
            trainer.strategy.drain()
        traced, self._profile = self._profile, None
        traced.stop()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # To end a trace amid messages may crash the process before the error is reported.
        self._profile = None


def profiler_named(name: str | None, folder: Path, rank: int) -> Profiler | None:
    """That of Lightning's which ``trainer.profiler`` names; None for torch's, which is a callback, and for none."""
    if name == "simple":
        return SimpleProfiler(dirpath=folder, filename=f"rank{rank}")
    return AdvancedProfiler(dirpath=folder, filename=f"rank{rank}") if name == "advanced" else None
