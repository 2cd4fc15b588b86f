"""Checks a composed config before anything starts, and reports all problems at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING
from importlib import import_module
from typing import Any

from lightning_parallel.settings import Count, described, fits, settings_of
from recipes import rules, schema, targets
from recipes.problem import Problem, closest
from recipes.schema import kind_of

Config = Mapping[str, Any]


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
    groups = {name: node for name, node in config.items() if isinstance(node, Mapping)}
    for name, node in groups.items():
        wrong += _group(name, node)
    broken = {problem.path for problem in wrong} | set(unsure)
    return [*wrong, *targets.problems(groups), *rules.problems(config, broken)]


# -- one value, one node ---------------------------------------------------------------------------------------------


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
