"""Checks a composed config before anything starts, and reports all problems at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint import is_whole
from lightning_parallel.settings import Count, described, fits, settings_of
from lightning_parallel.strategies.data_parallel import DataParallelOptions
from lightning_parallel.strategies.fully_sharded import FullyShardedOptions
from lightning_parallel.strategies.pipeline import PipelineOptions
from lightning_parallel.strategies.pipeline_async import AsyncPipelineOptions
from recipes import resume, schema
from recipes.compose import NOT_KNOWN
from recipes.data.textfile import problem as unusable
from recipes.problem import Problem, closest

Config = Mapping[str, Any]


def validate(config: Config) -> list[Problem | str]:
    """All problems of a resolved config (plain dictionaries and lists), in the config's order."""
    problems: list[Problem | str] = list(_node("", config, schema.Run))
    # The groups, only where they are dictionaries at all: the others are already reported.
    groups = {name: node for name, node in config.items() if isinstance(node, Mapping)}
    for name, node in groups.items():
        problems += _group(name, node)
    if not problems:  # rules about several values need each of them to be right
        problems += _rules(config)
    return problems


def world_size(config: Config) -> int:
    """The processes of a run: one for strategy=single and strategy=dp, else ``cluster.devices``."""
    in_one_process = (schema.Single, DataParallelOptions)
    return 1 if kind_of("strategy", config["strategy"]) in in_one_process else int(config["cluster"]["devices"])


# -- one value, one node ---------------------------------------------------------------------------------------------


def kind_of(group: str, node: Config) -> type | None:
    """The dataclass that describes the node of a group; None where only the node's own class knows."""
    target = node.get("_target_")
    if group in schema.BY_GROUP:
        return schema.BY_GROUP[group]
    if group in schema.BY_NAME and target is None:
        return schema.BY_NAME[group].get(node.get("name", ""))
    return schema.BY_TARGET.get(group, {}).get(target)


def _group(name: str, node: Config) -> Iterator[Problem]:
    kind, target = kind_of(name, node), node.get("_target_")
    if kind is not None:
        by = {"name"} if name in schema.BY_NAME else {"_target_"} if name in schema.BY_TARGET else set()
        yield from _node(name, {key: value for key, value in node.items() if key not in by}, kind)
    elif name in schema.BY_NAME and target is None:
        fix = closest(str(node.get("name")), schema.BY_NAME[name]) + "; or give your own class as _target_"
        yield Problem(f"{name}.name", node.get("name"), f"no such {name}", fix)
    elif name in schema.BY_TARGET and not isinstance(target, str):
        known = next(iter(filter(None, schema.BY_TARGET[name])))
        yield Problem(f"{name}._target_", target, "not a class", f"name one, e.g. {known}")
    elif name in ("logger", "callbacks"):
        for key, item in node.items():
            if not (isinstance(item, Mapping) and isinstance(item.get("_target_"), str)):
                yield Problem(f"{name}.{key}", item, "has no class", "give it a _target_ and its arguments")
    elif name == "cluster" and not fits(node.get("devices"), Count):  # of a class of the user's own
        yield Problem("cluster.devices", node.get("devices"), "not a value it can have", f"give {described(Count)}")


def _node(path: str, node: Config, kind: type) -> Iterator[Problem]:
    """Keys that are unknown or absent, and values of a wrong type, in one node."""
    settings = {field.name: (field, hint) for field, hint in settings_of(kind)}
    prefix = f"{path}." if path else ""
    for key, value in node.items():
        if key not in settings:
            if kind is schema.Trainer and key in schema.TRAINER_SET_ELSEWHERE:
                yield Problem(prefix + key, value, "set by the recipe", f"use {schema.TRAINER_SET_ELSEWHERE[key]}")
            else:
                where = f"no such key in {path}" if path else "no such key"
                yield Problem(prefix + str(key), value, where, closest(str(key), settings))
        elif not fits(_given(value) if path else value, settings[key][1]) and not _is_made(value):
            fix = f"give {described(settings[key][1])}"
            yield Problem(prefix + key, value, "not a value it can have", fix)
    for name, (field, hint) in settings.items():
        if name not in node and field.default is MISSING:
            yield Problem(prefix + name, "", "missing", f"give {described(hint)}")


def _is_made(value: Any) -> bool:
    """Does Hydra make an object of the value? It is then left to its class."""
    return isinstance(value, Mapping) and "_target_" in value


def _given(value: Any) -> Any:
    """A dictionary without the entries of which Hydra makes objects."""
    return {key: item for key, item in value.items() if not _is_made(item)} if isinstance(value, Mapping) else value


# -- several values --------------------------------------------------------------------------------------------------


def _rules(config: Config) -> Iterator[Problem | str]:
    model, data = config["model"], config["data"]
    processes = world_size(config)
    yield from _model_and_data(model, data)
    kind = kind_of("strategy", config["strategy"])
    strategy = dict(config["strategy"])
    if kind is not None:  # what a config of the user's own leaves out has the default
        strategy = {field.name: field.default for field, _ in settings_of(kind)} | strategy
    batch = data.get("batch_size")
    if kind in (schema.DDP, FullyShardedOptions) and batch is not None and batch % processes:
        yield Problem(
            "data.batch_size",
            batch,
            f"can't be shared equally by cluster.devices={processes}",
            f"use a multiple of {processes}",
        )
    if kind is not None and "data_parallel" in strategy:
        yield from _axes(strategy, processes)
    if kind in (PipelineOptions, AsyncPipelineOptions):
        yield from _pipeline(strategy, batch)
    elif config["timeline"]:
        fix = "use a pipeline strategy, or timeline=false"
        yield Problem("timeline", True, "only a pipeline has one", fix)
    if kind_of("optimizer", config["optimizer"]) is schema.Muon:
        yield from _whole_matrices(strategy, kind)
    if kind is not None and kind not in (schema.Single, schema.DDP):
        yield from _refused_by(kind, strategy)
    yield from _checkpoints(config)
    scheduler = config["scheduler"]
    if scheduler.get("name") == "cosine" and scheduler["total_steps"] < 1:
        yield Problem(
            "scheduler.total_steps",
            scheduler["total_steps"],
            "the cosine has no end",
            "set trainer.max_steps or scheduler.total_steps to the updates of the run",
        )
    elif scheduler.get("name") == "cosine" and scheduler["warmup_steps"] >= scheduler["total_steps"]:
        yield Problem(
            "scheduler.warmup_steps",
            scheduler["warmup_steps"],
            f"the rate would still be rising at the end, scheduler.total_steps={scheduler['total_steps']}",
            f"use {max(1, scheduler['total_steps'] // 5)}, a fifth of the run",
        )


def _checkpoints(config: Config) -> Iterator[Problem]:
    """What a run begins with."""
    path, weights = config["ckpt_path"], config["init_from"]
    if path is not None and weights is not None:
        yield Problem("init_from", weights, f"ckpt_path={path} brings its own weights", "leave one of them out")
    elif path == resume.LAST:
        folder = config["paths"]["output_dir"]
        if folder != NOT_KNOWN and resume.newest(config) is None:
            fix = "name the folder of the run that is to go on with hydra.run.dir=FOLDER, or use resume=auto"
            yield Problem("ckpt_path", path, f"there is no checkpoint in {folder}", fix)
    else:
        yield from _checkpoint("ckpt_path", path)
        yield from _checkpoint("init_from", weights)


def _checkpoint(key: str, path: str | None) -> Iterator[Problem]:
    if path is None or "://" in path:  # what is elsewhere, the workers will see
        return
    if not Path(path).exists():
        yield Problem(key, path, "no such checkpoint", "give one that exists, or null")
    elif not (is_whole(Path(path)) or (key == "init_from" and path.endswith(".safetensors"))):
        yield Problem(key, path, "no checkpoint, or only a part of one", resume.another(Path(path)))


def _refused_by(kind: type, strategy: Config) -> Iterator[str]:
    """Settings that don't go together: the strategy itself says which."""
    settings = {field.name: strategy[field.name] for field, _ in settings_of(kind)}
    try:
        kind(**{name: value for name, value in settings.items() if not _is_made(value)})
    except ValueError as refused:
        yield f"strategy.{refused}"


def _model_and_data(model: Config, data: Config) -> Iterator[Problem]:
    takes, gives = schema.TAKES.get(model.get("name", "")), schema.GIVES.get(data.get("name", ""))
    if takes is not None and gives is not None and takes != gives:
        fitting = " or ".join(f"data={name}" for name, kind in schema.GIVES.items() if kind == takes)
        message = f"takes {takes}, but data={data['name']} gives {gives}"
        yield Problem("model.name", model["name"], message, f"use {fitting}")
    if model.get("name") == "gpt":
        if model["width"] % model["heads"]:
            fix = "choose one that does"
            yield Problem("model.heads", model["heads"], f"does not divide model.width={model['width']}", fix)
        if gives == "tokens" and model["context"] < data["context"]:
            message = f"shorter than the windows of data.context={data['context']}"
            yield Problem("model.context", model["context"], message, "make them equal")
    if model.get("name") == "lenet" and model["size"] % 4:
        yield Problem("model.size", model["size"], "two poolings can't halve it", "use a multiple of 4")
    if data.get("name") == "text":
        found = unusable(data["path"], data["context"])
        if found is not None:
            yield Problem("data.path", data["path"], *found)


def _axes(strategy: Config, processes: int) -> Iterator[Problem]:
    """The layout fills the processes."""
    sizes = {key: strategy[key] for key in ("stages", "data_parallel", "tensor_parallel") if key in strategy}
    automatic = [key for key, size in sizes.items() if size == "auto"]
    if len(automatic) > 1 and "data_parallel" in automatic:  # the data axis gives way
        automatic.remove("data_parallel")
        sizes["data_parallel"] = 1
    product = math.prod(size for size in sizes.values() if size != "auto")
    if len(automatic) > 1:
        names = " and ".join(f"strategy.{key}" for key in automatic)
        yield Problem(names, "auto", f"cluster.devices={processes} is shared out in several ways", "give one a number")
    elif processes % product or (not automatic and processes != product):
        key = max((key for key, size in sizes.items() if size != "auto"), key=lambda key: sizes[key])
        what = " x ".join(f"strategy.{name}={size}" for name, size in sizes.items() if size not in ("auto", 1))
        fix = f"set cluster.devices={product}, or " + ("a multiple of it" if automatic else f"strategy.{key}=auto")
        yield Problem(f"strategy.{key}", sizes[key], f"{what} does not fill cluster.devices={processes}", fix)


def _pipeline(strategy: Config, batch: int | None) -> Iterator[Problem]:
    microbatches = strategy["microbatches"]
    if microbatches != "auto" and batch is not None and microbatches > batch:
        yield Problem(
            "strategy.microbatches",
            microbatches,
            f"more than the data.batch_size={batch} samples that they share",
            f"use at most {batch}",
        )


def _whole_matrices(strategy: Config, kind: type | None) -> Iterator[Problem]:
    """Muon steps matrices as wholes. It is said here too, since a pipeline stage without matrices can't tell."""
    undivided = {"tensor_parallel": 1, "data_parallel_kind": "replicate"}
    for key, whole in undivided.items():
        if key in strategy and strategy[key] != whole:
            fix = f"use strategy.{key}={whole}, or optimizer=adamw"
            yield Problem(f"strategy.{key}", strategy[key], "divides matrices, which Muon needs whole", fix)
    if kind is FullyShardedOptions:
        fix = "use optimizer=adamw, or another strategy"
        yield Problem("strategy._target_", strategy["_target_"], "divides matrices, which Muon needs whole", fix)
