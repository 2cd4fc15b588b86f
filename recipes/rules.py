"""Rules about several values of a config. A rule is left out if it looks at a value that is wrong by itself."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint import is_whole
from lightning_parallel.checkpoint.directory import instead_of
from lightning_parallel.settings import settings_of
from lightning_parallel.strategies.data_parallel import DataParallelOptions
from lightning_parallel.strategies.fully_sharded import FullyShardedOptions
from lightning_parallel.strategies.pipeline import PipelineOptions
from lightning_parallel.strategies.pipeline_async import AsyncPipelineOptions
from lightning_parallel.strategies.tensor import TensorParallelOptions
from recipes import examples, model_rules, process_rules, resume, schema
from recipes.examples import example_of
from recipes.problem import NOT_KNOWN, Problem
from recipes.process_rules import counted, restarts_by_itself
from recipes.schema import kind_of, world_size

Config = Mapping[str, Any]


def problems(config: Config, broken: Collection[str]) -> Iterator[Problem | str]:
    """What doesn't go together in a resolved config.

    Args:
        broken: paths of values that are wrong by themselves, or absent.
    """
    sound = _Sound(config, "", broken)
    for rule in (*model_rules.RULES, *_RULES, *process_rules.RULES):
        try:
            yield from list(rule(sound))
        except _BrokenValue:
            continue  # it has been reported


class _BrokenValue(Exception):
    """A rule looks at a value that is wrong by itself."""


class _Sound(Mapping[str, Any]):
    """A node of a config, whose broken values can't be read. ``path`` is the node's, with a dot at the end."""

    def __init__(self, node: Config, path: str, broken: Collection[str]) -> None:
        self._node, self._path, self._broken = node, path, broken

    def __getitem__(self, key: str) -> Any:
        path = f"{self._path}{key}"
        if path in self._broken:
            raise _BrokenValue(path)
        value = self._node[key]
        return _Sound(value, f"{path}.", self._broken) if isinstance(value, Mapping) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)


def _batch_size(config: Config) -> int | None:
    """Samples per batch; None where the data of the user's own don't say it with a number."""
    size = config["data"].get("batch_size")
    return size if isinstance(size, int) else None


# -- the strategy ----------------------------------------------------------------------------------------------------


def _strategy(config: Config) -> tuple[type | None, Mapping[str, Any]]:
    """Its kind, and its settings; what a config of the user's own leaves out has the default."""
    node = config["strategy"]
    kind = kind_of("strategy", node)
    defaults = {} if kind is None else {field.name: field.default for field, _ in settings_of(kind)}
    return kind, ChainMap(node, defaults)


def _equal_shares(config: Config) -> Iterator[Problem]:
    kind, _ = _strategy(config)
    batch, processes = _batch_size(config), world_size(config)
    if kind in (schema.DDP, FullyShardedOptions) and batch is not None and batch % processes:
        message = f"can't be shared equally by {counted(config)}"
        yield Problem("data.batch_size", batch, message, f"use a multiple of {processes}")


def _axes(config: Config) -> Iterator[Problem]:
    """The layout fills the processes."""
    kind, strategy = _strategy(config)
    if kind is None or "data_parallel" not in strategy:
        return
    processes, sizes = world_size(config), _sizes(strategy)
    automatic = [key for key, size in sizes.items() if size == "auto"]
    product = math.prod(size for size in sizes.values() if size != "auto")
    if len(automatic) > 1:
        names = " and ".join(f"strategy.{key}" for key in automatic)
        yield Problem(names, "auto", f"{counted(config)} is shared out in several ways", "give one a number")
    elif processes % product or (not automatic and processes != product):
        key = max((key for key, size in sizes.items() if size != "auto"), key=lambda key: sizes[key])
        what = " x ".join(f"strategy.{name}={size}" for name, size in sizes.items() if size not in ("auto", 1))
        nodes = config["cluster"].get("nodes", 1)
        wanted = f"{product} processes" if product % nodes else f"cluster.devices={product // nodes}"
        fix = f"set {wanted}, or " + ("a multiple of it" if automatic else f"strategy.{key}=auto")
        yield Problem(f"strategy.{key}", sizes[key], f"{what} does not fill {counted(config)}", fix)
    else:
        stages = sizes.get("stages", 1)
        yield from _stages(config, strategy, processes // product if stages == "auto" else stages)


def _sizes(strategy: Config) -> dict[str, Any]:
    """Of the axes. The data axis gives way where another one is automatic too."""
    sizes = {key: strategy[key] for key in ("stages", "data_parallel", "tensor_parallel") if key in strategy}
    if list(sizes.values()).count("auto") > 1 and sizes["data_parallel"] == "auto":
        sizes["data_parallel"] = 1
    return sizes


def _stages(config: Config, strategy: Config, stages: int) -> Iterator[Problem]:
    """Each stage of an example model gets something that learns."""
    model = config["model"]
    example = examples.MODELS.get(example_of(model))
    most = example.most_stages if example is not None else None
    chunks = _chunks(strategy)
    limit = most(model.get("layers", 0)) // chunks if most is not None else stages
    if stages > limit:
        each = "" if chunks == 1 else f" with {chunks} chunks each"
        message = f"{stages} stages{each}, but model={model['name']} can be cut into {limit} at most"
        more = ", or more model.layers" if "layers" in model else ""
        yield Problem("strategy.stages", strategy["stages"], message, f"use fewer stages{more}")


def _chunks(strategy: Config) -> int:
    """Of layers, in each stage."""
    several = strategy.get("schedule") in ("interleaved", "zbv", "vhalf", "vmin")
    wanted = strategy.get("chunks", "auto")
    return (2 if several else 1) if wanted == "auto" else int(wanted)


def _microbatches(config: Config) -> Iterator[Problem]:
    kind, strategy = _strategy(config)
    if kind not in (PipelineOptions, AsyncPipelineOptions):
        return
    microbatches, batch = strategy["microbatches"], _batch_size(config)
    if microbatches != "auto" and batch is not None and microbatches > batch:
        message = f"more than the data.batch_size={batch} samples that they share"
        yield Problem("strategy.microbatches", microbatches, message, f"use at most {batch}")


def _timeline(config: Config) -> Iterator[Problem]:
    kind, _ = _strategy(config)
    if kind not in (PipelineOptions, AsyncPipelineOptions) and config["timeline"]:
        fix = "use a pipeline strategy, or timeline=false"
        yield Problem("timeline", True, "only a pipeline has one", fix)


def _compiled(config: Config) -> Iterator[Problem]:
    """Where ranks hold parts of a layer: torch 2.13 crashed in a compiled one that was fully sharded."""
    kind, strategy = _strategy(config)
    divided = strategy.get("tensor_parallel", 1) != 1 or strategy.get("data_parallel_kind") == "fully_shard"
    others = (TensorParallelOptions, FullyShardedOptions, DataParallelOptions)
    if config.get("compile") and (divided or kind in others):
        message = "layers that ranks divide, or that are copied in one process, aren't compiled"
        yield Problem("compile", True, message, "use a pipeline, ddp or single, or compile=false")


def _refused(config: Config) -> Iterator[str]:
    """Settings that don't go together: the strategy itself says which."""
    kind, strategy = _strategy(config)
    if kind is None or kind in (schema.Single, schema.DDP):
        return
    settings = {field.name: strategy[field.name] for field, _ in settings_of(kind)}
    try:
        kind(**{name: value for name, value in settings.items() if not isinstance(value, Mapping)})
    except ValueError as refused:
        yield f"strategy.{refused}"


# -- the run ---------------------------------------------------------------------------------------------------------


def _checkpoint(config: Config) -> Iterator[Problem]:
    path, weights = config["ckpt_path"], config["init_from"]
    if path is not None and weights is not None:
        yield Problem("init_from", weights, f"ckpt_path={path} brings its own weights", "leave one of them out")
    elif path == resume.LAST:
        folder = config["paths"]["output_dir"]
        if folder != NOT_KNOWN and resume.newest(config) is None:
            fix = "name the folder of the run that is to go on with hydra.run.dir=FOLDER, or use resume=auto"
            yield Problem("ckpt_path", path, f"there is no checkpoint in {folder}", fix)
    else:
        yield from _incomplete("ckpt_path", path)
        yield from _incomplete("init_from", weights)


def _finds_checkpoints(config: Config) -> Iterator[Problem]:
    """Where a callback saves is known before the start."""
    is_restarted = config["cluster"].get("max_restarts", 0) > 0 or restarts_by_itself(config)
    if config["resume"] is None and config["ckpt_path"] != resume.LAST and not is_restarted:
        return
    for key, node in config["callbacks"].items():
        if resume.is_model_checkpoint(node) and node.get("dirpath") is None:
            fix = "set it, for example to ${paths.output_dir}/checkpoints"
            yield Problem(f"callbacks.{key}.dirpath", None, "where it saves depends on the logger", fix)


def _incomplete(key: str, path: str | None) -> Iterator[Problem]:
    if path is None or "://" in path:  # what is elsewhere, the workers will see
        return
    if not Path(path).exists():
        yield Problem(key, path, "no such checkpoint", "give one that exists, or null")
    elif not (is_whole(Path(path)) or (key == "init_from" and path.endswith(".safetensors"))):
        yield Problem(key, path, "no checkpoint, or only a part of one", instead_of(Path(path)))


def _schedule(config: Config) -> Iterator[Problem]:
    scheduler = config["scheduler"]
    if example_of(scheduler) != "cosine":
        return
    warmup, total = scheduler["warmup_steps"], scheduler["total_steps"]
    if total < 1:
        fix = "set trainer.max_steps or scheduler.total_steps to the updates of the run"
        yield Problem("scheduler.total_steps", total, "the cosine has no end", fix)
    elif warmup >= total:
        message = f"the rate would still be rising at the end, scheduler.total_steps={total}"
        yield Problem("scheduler.warmup_steps", warmup, message, f"use {max(1, total // 5)}, a fifth of the run")


_RULES: tuple[Callable[[Config], Iterator[Problem | str]], ...] = (
    _equal_shares,
    _axes,
    _microbatches,
    _timeline,
    _compiled,
    _refused,
    _checkpoint,
    _finds_checkpoints,
    _schedule,
)
