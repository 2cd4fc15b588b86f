"""Composes configs without running them: every job of a command line is checked before the first starts."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes import record
from recipes.configs import Configs
from recipes.data import image_folder
from recipes.problem import Problem, closest

NOT_KNOWN = "OUTPUT_DIR"  # the folder of a run, where Hydra has yet to choose it
_PATHS = (  # of the examples
    ("model", "path"),
    ("model", "pretrained"),
    ("data", "path"),
    ("data", "val_path"),
    ("data", "tokenizer"),
)
_JOBS_CHECKED = 64  # of a sweep; the rest are checked as they start


def resolved(config: DictConfig, output_dir: str, *, look_at_data: bool = True) -> dict[str, Any]:
    """The config as plain dictionaries and lists, interpolations filled in, paths absolute, and a seed drawn for none.

    Args:
        config: as composed.
        output_dir: the folder of the run.
        look_at_data: fill in the classes of images where none are told.

    Raises:
        OmegaConfBaseException: an interpolation leads nowhere, or a mandatory value is missing.
    """
    config = config.copy()
    OmegaConf.update(config, "paths.output_dir", output_dir)
    OmegaConf.update(config, "paths.data_dir", str(Path(config.paths.data_dir).absolute()))
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    if plain["seed"] is None:
        plain["seed"] = secrets.randbelow(2**31)
    for node, key in _PATHS:  # a later command may be started in another folder
        value = plain[node].get(key)
        if isinstance(value, str) and "_target_" not in plain[node]:
            plain[node][key] = str(Path(value).absolute())
    if look_at_data:
        _tell_classes(plain)
    return {str(key): value for key, value in plain.items()}


def _tell_classes(config: dict[Any, Any]) -> None:
    """Record the names of the images' classes: a label is a place among them. A classifier has as many, where it is
    told no number."""
    model, data = config["model"], config["data"]
    path = data.get("path")
    if "_target_" in data or data.get("name") != "images" or not isinstance(path, str):
        return
    if data.get("classes") is None and image_folder.problem(path) is None:
        data["classes"] = _recorded_classes(config) or image_folder.classes_of(Path(path))
    if isinstance(data.get("classes"), list) and "_target_" not in model and model.get("classes", 0) is None:
        model["classes"] = len(data["classes"])


def _recorded_classes(config: Mapping[Any, Any]) -> list[str] | None:
    """Those of the run that goes on; None where there is none."""
    asked = config.get("ckpt_path")
    if config.get("resume") == "auto" or asked == "last":
        folders = [Path(config["paths"]["output_dir"])]
    else:
        folders = list(Path(asked).absolute().parents) if isinstance(asked, str) else []
    run = next((folder for folder in folders if (folder / record.CONFIG).is_file()), None)
    found = None if run is None else record.read_config(run).get("data", {}).get("classes")
    return found if isinstance(found, list) else None


def check(overrides: Sequence[str], *, multirun: bool = False, configs: Configs | None = None) -> list[Problem | str]:
    """All problems of a command line: unknown options and keys, and those of the values that are composed from the
    rest of it.

    Args:
        overrides: of the command line.
        multirun: they are of a sweep.
        configs: where configs are found; default: in conf/ only.

    Raises:
        HydraException: no config can be composed, for a reason that Hydra explains itself.
    """
    configs = configs or Configs()
    try:
        return _checked(overrides, configs, multirun=multirun)
    except MissingConfigException as error:  # a file has named it: what the command line names is known
        return [configs.missing(error)]
    except yaml.YAMLError as error:
        return [f"not YAML: {' '.join(str(error).split())}"]


def _checked(overrides: Sequence[str], configs: Configs, *, multirun: bool) -> list[Problem | str]:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    hidden = configs.problem_of_name()
    if hidden is not None:
        return [hidden]
    with configs.opened():
        searched, searches = _search(parsed, configs)
        wrong = list(_unknown(parsed, configs))
        # What belongs to an option that there isn't can't be judged.
        options = {override.key_or_group for override, _ in wrong} & configs.options().keys()
        misspelt = {id(override) for override, _ in wrong}
        rest = [each for each in parsed if id(each) not in misspelt and _top(each) not in options]
        told = [problem for _, problem in wrong]
        if told and (not rest or any(map(configs.is_global, options))):
            return list(told)  # at once
        unsure = {_top(override) for override, _ in wrong}
        rest = list({each.key_or_group: each for each in (*searched, *rest)}.values())
        commands = jobs(rest, one_change_each=searches) if multirun or searches else [_words(rest)]
        return [*told, *_wrong_values(commands, unsure, configs, multirun=multirun or searches)]


def unknown(overrides: Sequence[str], configs: Configs) -> list[Problem]:
    """The problems of a command line with names alone: options and keys that there aren't."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    with configs.opened():
        return [problem for _, problem in _unknown(parsed, configs)]


def _search(parsed: Sequence[Override], configs: Configs) -> tuple[list[Override], bool]:
    """What a search tries besides what the command line says, and whether there is one."""
    chosen = [str(each.input_line) for each in parsed if each.key_or_group in ("hparams_search", "hydra/sweeper")]
    if not chosen:
        return [], False
    try:
        hydra = configs.composed(chosen, hydra=True).hydra
    except HydraException:
        return [], False  # there is no such option
    params = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
    return OverridesParser.create().parse_overrides(params), hydra.mode == RunMode.MULTIRUN


def _wrong_values(
    commands: Sequence[Sequence[str]], unsure: Collection[str], configs: Configs, *, multirun: bool
) -> list[Problem | str]:
    """Problems of what is composed. Jobs of a sweep share most of theirs."""
    from recipes.validate import validate  # here: it imports torch, which takes seconds

    found: dict[str, Problem | str] = {}
    for words in commands:
        config = configs.composed(words, hydra=True)
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            wrong = validate(resolved(own, NOT_KNOWN if multirun else str(config.hydra.run.dir)), unsure)
        except OmegaConfBaseException as error:
            wrong = [str(error)]
        wrong = [*filter(None, starmap(configs.problem, config.hydra.runtime.choices.items())), *wrong]
        if multirun:
            wrong = [*started_several_times(config.hydra.launcher), *wrong]
        found.update((str(problem), problem) for problem in wrong)
    return list(found.values())


def started_several_times(launcher: DictConfig) -> Iterator[Problem]:
    """Hydra's launcher may start a job in several processes. Each would run the whole recipe in the same folder."""
    for key in ("nodes", "tasks_per_node"):  # of submitit's
        if launcher.get(key, 1) != 1:
            message = "each would run the whole recipe, in one folder"
            fix = "use 1; cluster=slurm cluster.nodes=N is a run on several machines"
            yield Problem(f"hydra.launcher.{key}", launcher[key], message, fix)


def jobs(parsed: Sequence[Override], *, one_change_each: bool = False) -> list[list[str]]:
    """The command lines of a sweep over lists, as Hydra's own sweeper splits them; of a long sweep, the first ones. Of
    an interval, its ends.

    Args:
        parsed: the command line.
        one_change_each: each command changes one value. The others keep the first of their list. A search tries only
            some combinations, so not all are checked.

    Raises:
        HydraException: there is nothing in a list.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parser = OverridesParser.create()
    lists = [_with_ends(each) for each in parsed]
    firsts = [_first(each) for each in parser.parse_overrides(lists)]
    several = [place for place, word in enumerate(lists) if word != firsts[place]]
    lines = [lists]
    if one_change_each and several:
        lines = [[*firsts[:place], lists[place], *firsts[place + 1 :]] for place in several]
    split = (BasicSweeper.split_arguments(parser.parse_overrides(words), None)[0] for words in lines)
    return [list(job) for each in split for job in each[:_JOBS_CHECKED]]


def _words(parsed: Sequence[Override]) -> list[str]:
    return [str(override.input_line) for override in parsed]


def _first(override: Override) -> str:
    if not override.is_sweep_override() or not override.is_discrete_sweep():
        return str(override.input_line)
    for value in override.sweep_string_iterator():
        return f"{override.get_key_element()}={value}"
    raise HydraException(f"{override.input_line}: there is nothing in it")


def _with_ends(override: Override) -> str:
    value = override.value()
    if isinstance(value, IntervalSweep):
        return f"{override.get_key_element()}={value.start},{value.end}"
    return str(override.input_line)


def _values(override: Override) -> list[Any]:
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_choice_sweep() else []
    return [override.value()]


def _top(override: Override) -> str:
    """The group or the value at the top level that it concerns."""
    return override.key_or_group.split(".")[0].split("/")[0]


def _unknown(parsed: Sequence[Override], configs: Configs) -> Iterator[tuple[Override, Problem]]:
    """Options that a group doesn't have, and keys that the config doesn't have with the chosen options."""
    groups = configs.options()
    chosen: list[str] = []
    broken: set[str] = set()
    for override in parsed:
        group = override.key_or_group
        if group in groups and override.package is None and not override.is_delete():
            values = _values(override)
            for value in values:
                name = "null" if value is None else value  # Hydra takes no null
                problem = configs.problem(group, name)
                if isinstance(name, str) and name not in groups[group] and configs.are_listed:
                    problem = Problem(group, name, f"no such {group}", closest(name, groups[group]))
                if problem is not None:
                    broken.add(group)
                    yield override, problem
            if group not in broken and values and isinstance(values[0], str):
                chosen.append(f"{group}={values[0]}")
    if any(map(configs.is_global, broken)):
        return  # keys may be of an option that it chooses
    config = configs.composed(chosen)
    for override in parsed:
        key, top = override.key_or_group, _top(override)
        plain = not (override.is_add() or override.is_force_add() or override.is_delete())
        if plain and key not in groups and top != "hydra" and top not in broken:
            for problem in _unknown_key(config, key, override):
                yield override, problem


def _unknown_key(config: DictConfig, key: str, override: Override) -> Iterator[Problem]:
    node: Any = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig):
            return  # an element of a list, or of nothing: Hydra says it well
        if part not in node:
            path = ".".join(parts[:depth])
            where = f"no such key in {path}" if path else "no such key"
            value = override.get_value_element_as_str()
            if depth == 1 and part == "_target_" and "name" in node:
                yield Problem(key, value, f"{path}={node.name} is an example", f"use {path}=custom {key}={value}")
            elif depth == 1 and part in _optional(path, node):
                yield Problem(key, value, f"not set in {path}", f"put + before it: +{key}={value}")
            else:
                custom = depth == 1 and path in ("model", "data") and "name" not in node
                plus = f"put + before an argument of your class that is not set: +{key}={value}; " if custom else ""
                yield Problem(key, value, where, plus + closest(part, [str(name) for name in node]))
            return
        node = node._get_node(part)
        if isinstance(node, DictConfig) and node._is_none():
            return


def _optional(group: str, node: Mapping[Any, Any]) -> set[str]:
    """The settings of a group that its YAML leaves out."""
    from lightning_parallel.settings import settings_of  # here, as above
    from recipes.schema import kind_of

    kind = kind_of(group, node)
    return {field.name for field, _ in settings_of(kind)} if kind is not None else set()
