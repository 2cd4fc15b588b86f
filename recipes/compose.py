"""Composes configs without running them: every job of a command line is checked before the first starts."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, product
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
from recipes.problem import NOT_KNOWN, Problem, closest

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
    Where images name no classes, ``look_at_data`` fills in those of their folder.

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
    """All problems of a command line, or of a sweep's: options that there aren't, and those of the composed values.

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
    hidden = configs.hidden()
    if hidden is not None:
        return [hidden]
    with configs.opened():
        wrong = list(_unknown(parsed, configs))
        broken = {problem.path for problem in wrong}
        # What belongs to an option that there isn't can't be judged.
        rest = [each for each in parsed if _top(each) not in broken]
        if wrong and (not rest or any(map(configs.is_global, broken))):
            return list(wrong)  # at once
        searched, searches = _search(rest, configs)
        rest = list({each.key_or_group: each for each in (*searched, *rest)}.values())
        sweeps = multirun or searches
        commands = jobs(rest, one_change_each=searches) if sweeps else [[str(each.input_line) for each in rest]]
        return [*wrong, *_wrong_values(commands, broken, configs, multirun=sweeps)]


def unknown(overrides: Sequence[str], configs: Configs) -> list[Problem]:
    """What is wrong with the options of a command line: their group has no such one, or their file isn't right."""
    with configs.opened():
        return list(_unknown(OverridesParser.create().parse_overrides(list(overrides)), configs))


def _unknown(parsed: Sequence[Override], configs: Configs) -> Iterator[Problem]:
    groups = configs.options()
    for override in parsed:
        group = override.key_or_group
        if group in groups and override.package is None and not override.is_delete():
            for value in _values(override):
                name = "null" if value is None else value  # Hydra takes no null
                problem = configs.problem(group, name)
                if isinstance(name, str) and name not in groups[group] and configs.are_listed:
                    problem = Problem(group, name, f"no such {group}", closest(name, groups[group]))
                if problem is not None:
                    yield problem


def composed(words: Sequence[str], configs: Configs, *, hydra: bool = False) -> DictConfig:
    """The config of a command line, with the keys in it that there aren't: the check of values tells of them all, where
    Hydra would stop at the first. The configs have been opened."""
    groups = configs.options()

    def is_value(each: Override) -> bool:
        prefixed = each.is_add() or each.is_force_add() or each.is_delete()
        return not prefixed and each.key_or_group not in groups and _top(each) != "hydra"

    parsed = OverridesParser.create().parse_overrides(list(words))
    lenient = [f"{'++' if is_value(each) else ''}{each.input_line}" for each in parsed]
    return configs.composed(lenient, hydra=hydra)


def _search(parsed: Sequence[Override], configs: Configs) -> tuple[list[Override], bool]:
    """What a search tries besides what the command line says, and whether there is one."""
    chosen = [str(each.input_line) for each in parsed if each.key_or_group in ("hparams_search", "hydra/sweeper")]
    if not chosen:
        return [], False
    hydra = configs.composed(chosen, hydra=True).hydra
    params = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
    return OverridesParser.create().parse_overrides(params), hydra.mode == RunMode.MULTIRUN


def _wrong_values(
    commands: Sequence[Sequence[str]], unsure: Collection[str], configs: Configs, *, multirun: bool
) -> list[Problem | str]:
    """Problems of what is composed. Jobs of a sweep share most of theirs."""
    from recipes.validate import validate  # here: it imports torch, which takes seconds

    found: dict[str, Problem | str] = {}
    for words in commands:
        config = composed(words, configs, hydra=True)
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            folder = NOT_KNOWN if multirun else str(config.hydra.run.dir)
            wrong = validate(resolved(own, folder), unsure)
        except OmegaConfBaseException as error:
            wrong = [str(error)]
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
    """The command lines of a sweep over lists; of a long sweep, the first ones. Of an interval, its ends. With
    ``one_change_each`` each command changes one value of the first: a search tries only some combinations.

    Raises:
        HydraException: there is nothing in a list.
    """
    lists = [_words(each) for each in parsed]
    if not one_change_each:
        return [list(job) for job in islice(product(*lists), _JOBS_CHECKED)]
    firsts = [words[0] for words in lists]
    several = [(place, word) for place, words in enumerate(lists) for word in words[1:]]
    return [firsts, *([*firsts[:place], word, *firsts[place + 1 :]] for place, word in several[:_JOBS_CHECKED])]


def _words(override: Override) -> list[str]:
    """One for each value of a list."""
    value, key = override.value(), override.get_key_element()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}", f"{key}={value.end}"]
    if not override.is_sweep_override():
        return [str(override.input_line)]
    words = [f"{key}={each}" for each in override.sweep_string_iterator()]
    if not words:
        raise HydraException(f"{override.input_line}: there is nothing in it")
    return words


def _values(override: Override) -> list[Any]:
    if override.is_sweep_override():
        return list(override.sweep_iterator()) if override.is_choice_sweep() else []
    return [override.value()]


def _top(override: Override) -> str:
    """The group or the value at the top level that it concerns."""
    return override.key_or_group.split(".")[0].split("/")[0]
