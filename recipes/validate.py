"""Checks a composed config before anything starts, and reports all problems at once."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING
from importlib import import_module
from inspect import Parameter
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer

from lightning_parallel.settings import Count, described, fits, nearest, settings_of
from recipes import rules, schema
from recipes.problem import Problem, closest
from recipes.schema import BY_NAME, kind_of

Config = Mapping[str, Any]

_NEEDS: Mapping[str, type] = MappingProxyType(
    {
        "model": pl.LightningModule,
        "data": pl.LightningDataModule,
        "strategy": Strategy,
        "optimizer": Optimizer,
        "logger": Logger,
        "callbacks": Callback,
    }
)
_CLASS_ONLY = ("model", "optimizer")  # in other groups, a function may make the object
_EXAMPLES = ("optimizer", "scheduler")  # what example models make themselves, and other models do with as they like
_OF_HYDRA = frozenset({"_target_", "_args_", "_partial_", "_convert_", "_recursive_"})


def validate(config: Config, unsure: Collection[str] = ()) -> list[Problem | str]:
    """All problems of a resolved config (plain dictionaries and lists), in the config's order.

    Args:
        config: with ``_target_`` where Hydra is to make an object.
        unsure: groups and keys that are not what the user wanted, since a name was misspelt. No rule is told by them.
    """
    wrong = list(_node("", config, schema.Run))
    if config.get("as_pytorch_lightning") is True:
        import_module("lightning_parallel.as_pytorch_lightning")
    # The groups, only where they are dictionaries at all: the others are already reported.
    groups = dict(_groups(config))
    for name, node in groups.items():
        wrong += _group(name, node)
    broken = {problem.path for problem in wrong} | set(unsure)
    return [*wrong, *_of_classes(groups), *rules.problems(config, broken)]


# -- one value, one node ---------------------------------------------------------------------------------------------


def _groups(config: Config) -> Iterator[tuple[str, Config]]:
    return ((name, node) for name, node in config.items() if isinstance(node, Mapping))


def _group(name: str, node: Config) -> Iterator[Problem]:
    kind, target = kind_of(name, node), node.get("_target_")
    if kind is not None:
        by = {"name"} if name in schema.BY_NAME else {"_target_"} if name in schema.BY_TARGET else set()
        yield from _node(name, {key: value for key, value in node.items() if key not in by}, kind)
    elif name in schema.BY_NAME and target is None and "name" not in node:
        yield Problem(f"{name}._target_", target, "not a class", f"name your own: {name}._target_=my_package.MyClass")
    elif name in schema.BY_NAME and target is None:
        fix = closest(str(node.get("name")), schema.BY_NAME[name]) + "; or give your own class as _target_"
        yield Problem(f"{name}.name", node.get("name"), f"no such {name}", fix)
    elif name in schema.BY_TARGET and not isinstance(target, str):
        known = next(iter(filter(None, schema.BY_TARGET[name])))
        yield Problem(f"{name}._target_", target, "not a class", f"name one, e.g. {known}")
    elif name in ("logger", "callbacks"):
        for key, item in node.items():
            # null switches one off
            if item is not None and not (isinstance(item, Mapping) and isinstance(item.get("_target_"), str)):
                yield Problem(f"{name}.{key}", item, "has no class", "give it a _target_ and its arguments")
    elif name == "cluster" and not fits(node.get("devices"), Count):  # of a class of the user's own
        yield Problem("cluster.devices", node.get("devices"), "not a value it can have", f"give {described(Count)}")


def _node(path: str, node: Config, kind: type) -> Iterator[Problem]:
    """Keys that are unknown or absent, and values of a wrong type, in one node."""
    settings = {field.name: (field, hint) for field, hint in settings_of(kind)}
    prefix = f"{path}." if path else ""
    others = set(inspect.signature(pl.Trainer).parameters) if kind is schema.Trainer else set()
    others -= schema.TRAINER_SET_ELSEWHERE.keys()
    for key, value in node.items():
        if key in others - settings.keys():
            continue
        if key not in settings:
            if kind is schema.Trainer and key in schema.TRAINER_SET_ELSEWHERE:
                yield Problem(prefix + key, value, "set by the recipe", f"use {schema.TRAINER_SET_ELSEWHERE[key]}")
            else:
                where = f"no such key in {path}" if path else "no such key"
                meant = nearest(str(key), settings) or str(key)
                fix = closest(meant, {*settings, *others})
                inside = {} if path else {str(name): group for group, keys in _groups(node) for name in keys}
                close = difflib.get_close_matches(str(key), settings, cutoff=0.8)
                if (found := nearest(str(key), inside)) and not close:
                    fix = f"did you mean {inside[found]}.{found}?"
                yield Problem(prefix + str(key), value, where, fix)
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


# -- classes ----------------------------------------------------------------------------------------------------------


def _of_classes(groups: Mapping[str, Config]) -> Iterator[Problem]:
    """What is wrong with the classes that groups name: each is found before a worker starts, is what its group needs,
    and takes the arguments that it is given."""
    example = groups.get("model", {}).get("_target_") is None
    if example and groups.get("scheduler", {}).get("_target_") is not None:
        fix = "use scheduler=constant or scheduler=cosine, or a model of your own as model._target_"
        target = groups["scheduler"]["_target_"]
        yield Problem("scheduler._target_", target, "the example models know schedules by their names", fix)
    for name, group in groups.items():
        several = name in ("logger", "callbacks")
        nodes = {f"{name}.{key}": node for key, node in group.items()} if several else {name: group}
        for path, node in nodes.items():
            if not (isinstance(node, Mapping) and isinstance(node.get("_target_"), str)):
                continue
            if name in _EXAMPLES and not example:
                yield from (found for found in [_found(path, node)] if isinstance(found, Problem))
            elif name != "scheduler" and kind_of(name, node) is None:  # its class knows what it takes
                yield from _problems(path, node, name)
            else:
                yield from _inside(path, node)


def _problems(path: str, node: Config, group: str | None = None) -> Iterator[Problem]:
    """Of a node, and of those in it."""
    target = _found(path, node)
    if isinstance(target, Problem):
        yield target
        return
    needed = _NEEDS.get(group or "")
    fits = issubclass(target, needed or object) if inspect.isclass(target) else group not in _CLASS_ONLY
    if needed is not None and not fits:
        fix = f"name a subclass of {needed.__module__.split('.')[0]}'s {needed.__name__}"
        bases = inspect.getmro(target) if inspect.isclass(target) else ()
        if any(base.__module__.startswith("pytorch_lightning") for base in bases):
            fix = "use as_pytorch_lightning=true: it is a class of pytorch_lightning"
        yield Problem(f"{path}._target_", node["_target_"], f"not what {group} needs", fix)
        return
    example = node.get("name")
    takes_name = any(each.name == "name" or each.kind is Parameter.VAR_KEYWORD for each in _parameters(target))
    if group is not None and example in BY_NAME.get(group, ()) and not takes_name:
        fix = f"use {group}=custom {group}._target_={node['_target_']}"
        yield Problem(f"{path}._target_", node["_target_"], f"has the settings of {group}={example}, too", fix)
        return
    yield from _arguments(path, node, target, leading=group == "optimizer")
    passed_on = _EXAMPLES if group == "model" else ()  # the model makes them
    yield from _inside(path, {key: value for key, value in node.items() if key not in passed_on})


def _parameters(target: Any) -> list[Parameter]:
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # of a type that isn't written in Python: it may take anything
        return [Parameter("anything", Parameter.VAR_KEYWORD)]


def _inside(path: str, node: Config) -> Iterator[Problem]:
    for key, value in node.items():
        for place, each in _nodes(f"{path}.{key}", value):
            if isinstance(each.get("_target_"), str):
                yield from _problems(place, each)


def _nodes(path: str, value: Any) -> Iterator[tuple[str, Config]]:
    """A dictionary, or those in a list."""
    if isinstance(value, Mapping):
        yield path, value
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _nodes(f"{path}[{number}]", each)


def _arguments(path: str, node: Config, target: Any, *, leading: bool) -> Iterator[Problem]:
    """Do a node's arguments fit the signature of what it names? A leading parameter is passed by someone else."""
    parameters = _parameters(target)[int(leading) :]
    named = {p.name: p for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    given = {key: value for key, value in node.items() if key not in _OF_HYDRA}
    if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        for key in (key for key in given if key not in named):
            message = f"no argument of {node['_target_']}"
            yield Problem(f"{path}.{key}", given[key], message, closest(str(key), named))
    if "_args_" not in node and not node.get("_partial_"):
        for name, parameter in named.items():
            if parameter.default is Parameter.empty and name not in given:
                yield Problem(f"{path}.{name}", "", f"{node['_target_']} needs it", f"set +{path}.{name}=VALUE")


# -- finding a class -------------------------------------------------------------------------------------------------


def _found(path: str, node: Config) -> Any:
    """What the node names, or the problem with that."""
    name = node["_target_"]
    reached, *rest = name.split(".")
    place, part = f"{path}._target_", ""
    try:
        found: Any = importlib.import_module(reached)
        for part in rest:
            if not hasattr(found, part):
                importlib.import_module(f"{reached}.{part}")
            found, reached = getattr(found, part), f"{reached}.{part}"
    except ModuleNotFoundError as error:
        if part and error.name == f"{reached}.{part}":
            return Problem(place, name, f"{reached} has no {part}", _near(part, dir(found)))
        fix = "name one that is installed, or in the folder from which you start"
        return Problem(place, name, f"there is no module {error.name}", fix)
    except (Exception, SystemExit) as error:  # any: it is the user's code
        return Problem(place, name, f"can't be imported: {type(error).__name__}: {error}", "correct that module")
    return found if callable(found) else Problem(place, name, "not a class", "name a class")


def _near(wrong: str, known: list[str]) -> str:
    match = difflib.get_close_matches(wrong, [name for name in known if not name.startswith("_")], n=1)
    return f"did you mean {match[0]}?" if match else "name a class that it has"
