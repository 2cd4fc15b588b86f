"""Checks a composed config before anything starts, and tells all that is wrong with it at once."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra.errors import CompactHydraException

from recipes import schema
from recipes.data.textfile import problem as unusable

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a config: where, what, and how to put it right."""

    path: str
    value: Any
    message: str
    fix: str

    def __str__(self) -> str:
        value = "null" if self.value is None else str(self.value)
        return f"{self.path}={value}: {self.message}; {self.fix}"


class ConfigError(CompactHydraException):
    """A config that cannot be run. Hydra prints its message without a stack trace."""

    def __init__(self, problems: Iterable[Problem | str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{count} problem{'s' * (count != 1)} in the config, nothing was started:{lines}")


def validate(config: Config) -> list[Problem]:
    """All problems of a resolved config (plain dictionaries and lists), in the config's order."""
    problems = list(_node("", config, schema.Run))
    # The groups, only where they are dictionaries at all: the others are already reported.
    groups = {name: node for name, node in config.items() if isinstance(node, Mapping)}
    for name, node in groups.items():
        problems += _group(name, node)
    if not problems:  # rules about several values take each of them to be right
        problems += _rules(config)
    return problems


def world_size(config: Config) -> int:
    """Processes of a run: one for strategy=single and strategy=dp, else ``cluster.devices``."""
    kind = schema.BY_TARGET.get(config["strategy"]["_target_"])
    return 1 if kind in (schema.Single, schema.DataParallel) else int(config["cluster"]["devices"])


def closest(wrong: str, known: Iterable[str]) -> str:
    """``did you mean ...? known: ...`` for an error message."""
    known = sorted(known)
    match = difflib.get_close_matches(wrong, known, n=1)
    return (f"did you mean {match[0]}? " if match else "") + f"known: {', '.join(known)}"


# ------------------------------------------------------------ one value, one node


def kind_of(group: str, node: Config) -> type | None:
    """The dataclass that describes the node of a group; None where only its own class knows."""
    if group in schema.BY_GROUP:
        return schema.BY_GROUP[group]
    if group in schema.BY_NAME and node.get("_target_") is None:
        return schema.BY_NAME[group].get(node.get("name", ""))
    if group == "strategy" or (group == "optimizer" and node.get("_target_") is not None):
        return schema.BY_TARGET.get(node.get("_target_"))
    return None


def _group(name: str, node: Config) -> Iterator[Problem]:
    kind, target = kind_of(name, node), node.get("_target_")
    if kind is not None:
        yield from _node(name, node, kind)
    elif name in schema.BY_NAME and target is None:
        fix = closest(str(node.get("name")), schema.BY_NAME[name]) + "; or give your own class as _target_"
        yield Problem(f"{name}.name", node.get("name"), f"no such {name}", fix)
    elif name in ("strategy", "optimizer") and not isinstance(target, str):
        yield Problem(f"{name}._target_", target, "not a class", "name one, e.g. torch.optim.AdamW")
    elif name in ("logger", "callbacks"):
        for key, item in node.items():
            if not (isinstance(item, Mapping) and isinstance(item.get("_target_"), str)):
                yield Problem(f"{name}.{key}", item, "has no class", "give it a _target_ and its arguments")


def _node(path: str, node: Config, kind: type) -> Iterator[Problem]:
    """Keys that are unknown or absent, and values of a wrong type, in one node."""
    hints = get_type_hints(kind, include_extras=True)
    prefix = f"{path}." if path else ""
    for key, value in node.items():
        if key not in hints:
            if kind is schema.Trainer and key in schema.TRAINER_SET_ELSEWHERE:
                yield Problem(prefix + key, value, "set by the recipe", f"use {schema.TRAINER_SET_ELSEWHERE[key]}")
            else:
                where = f"no such key in {path}" if path else "no such key"
                yield Problem(prefix + str(key), value, where, closest(str(key), hints))
        elif not _fits(value, hints[key]):
            fix = f"give {_describe(hints[key])}"
            yield Problem(prefix + key, value, "not a value it can have", fix)
    for spec in fields(kind):
        if spec.name not in node and spec.default is MISSING:
            fix = f"give {_describe(hints[spec.name])}"
            yield Problem(prefix + spec.name, "", "missing", fix)


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of the type ``hint``. Integers are floats too, booleans are no numbers."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        return _fits(value, args[0]) and value in args[1]
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in args)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(_fits(item, args[1]) for item in value.values())
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{_describe(args[0])} {args[1]}"
    if origin is Literal:
        return " or ".join(str(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return ", or ".join(_describe(option) for option in args)
    if origin is list:
        return f"a list ({_describe(args[0])} each)"
    if origin is dict:
        return "a dictionary"
    return _WORDS[hint if hint is not None else type(None)]


# ------------------------------------------------------------ several values


def _rules(config: Config) -> Iterator[Problem]:
    model, data, strategy = config["model"], config["data"], config["strategy"]
    processes = world_size(config)
    yield from _model_and_data(model, data)
    target = strategy["_target_"]
    kind = schema.BY_TARGET.get(target)
    batch = data.get("batch_size")
    if kind in (schema.DDP, schema.FullySharded) and batch is not None and batch % processes:
        yield Problem(
            "data.batch_size",
            batch,
            f"cannot be shared equally by cluster.devices={processes}",
            f"use a multiple of {processes}",
        )
    if kind in (schema.Pipeline, schema.AsyncPipeline, schema.TensorParallel, schema.FullySharded):
        yield from _axes(strategy, processes)
    if kind in (schema.Pipeline, schema.AsyncPipeline):
        yield from _pipeline(strategy, batch)
    elif config["timeline"]:
        fix = "use a pipeline strategy, or timeline=false"
        yield Problem("timeline", True, "only a pipeline has one", fix)
    if kind_of("optimizer", config["optimizer"]) is schema.Muon:
        yield from _whole_matrices(strategy)
    if config["ckpt_path"] is not None and not Path(config["ckpt_path"]).exists():
        yield Problem("ckpt_path", config["ckpt_path"], "no such checkpoint", "give one that exists, or null")
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
        yield Problem("model.size", model["size"], "two poolings cannot halve it", "use a multiple of 4")
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
    if strategy.get("schedule") == "naive" and microbatches not in ("auto", 1):
        fix = "use strategy=pipeline_sync, or strategy.microbatches=1"
        yield Problem("strategy.microbatches", microbatches, "the naive schedule has one", fix)
    if microbatches != "auto" and batch is not None and microbatches > batch:
        yield Problem(
            "strategy.microbatches",
            microbatches,
            f"more than the data.batch_size={batch} samples that they share",
            f"use at most {batch}",
        )


def _whole_matrices(strategy: Config) -> Iterator[Problem]:
    """Muon steps matrices as wholes. Said here too, since under a pipeline a stage without matrices can't tell."""
    sharded = {"tensor_parallel": 1, "data_parallel_kind": "replicate"}
    for key, whole in sharded.items():
        if key in strategy and strategy[key] != whole:
            fix = f"use strategy.{key}={whole}, or optimizer=adamw"
            yield Problem(f"strategy.{key}", strategy[key], "divides matrices, which Muon needs whole", fix)
    if schema.BY_TARGET.get(strategy["_target_"]) is schema.FullySharded:
        fix = "use optimizer=adamw, or another strategy"
        yield Problem("strategy._target_", strategy["_target_"], "divides matrices, which Muon needs whole", fix)
