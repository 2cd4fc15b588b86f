"""Where configs are found: in conf/, and in folders of the user's own (``--config-dir``, ``hydra.searchpath``)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.conf import HydraConf
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from recipes import CONF
from recipes.problem import ConfigError, Problem, closest

_SEARCH_PATH = "hydra.searchpath"
_FILE = "file://"
_GLOBAL = "# @package _global_"
_OF_HYDRA = ("hydra", "main", "schema")  # providers of what is always searched


@dataclass(frozen=True, slots=True)
class Configs:
    """Where those of a command line are found.

    Attributes:
        main: the folder that is searched first.
        name: of the config that all others are composed into.
        own: what is searched after that: absolute folders as ``file://...``, and packages as ``pkg://...``.
    """

    main: Path = CONF
    name: str = "train"
    own: tuple[str, ...] = ()

    @classmethod
    def of_command_line(cls, args: Namespace) -> Configs:
        """Of Hydra's arguments.

        Raises:
            ConfigError: there is no such folder or config.
            HydraException: of the command line's grammar.
            yaml.YAMLError: the config is no YAML.
        """
        name = args.config_name or cls().name
        configs = cls(name=name, own=_absolute([args.config_dir] if args.config_dir is not None else []))
        if not all(folder.is_dir() for folder in configs.folders):
            raise ConfigError([f"--config-dir={args.config_dir}: there is no such folder"])
        primary = {file.stem: file for folder in (*configs.folders, CONF) for file in folder.glob("*.yaml")}
        if name not in primary:
            raise ConfigError([Problem("--config-name", name, "there is no such config", closest(name, primary))])
        searched = OmegaConf.select(OmegaConf.load(primary[name]), _SEARCH_PATH) or []
        for override in OverridesParser.create().parse_overrides(list(args.overrides)):
            if override.key_or_group == _SEARCH_PATH:
                searched = override.value()  # in place of the config's
        more = cls(name=name, own=_absolute(searched))
        missing = [str(folder) for folder in more.folders if not folder.is_dir()]
        if missing:
            raise ConfigError([f"{_SEARCH_PATH}: there is no folder {', '.join(missing)}"])
        return cls(name=name, own=(*configs.own, *more.own))

    @classmethod
    def of_job(cls, job: HydraConf) -> Configs:
        """Of a job that Hydra has started."""
        sources = job.runtime.config_sources
        main = next(source.path for source in sources if source.provider == "main")
        own = [f"{source.schema}://{source.path}" for source in sources if source.provider not in _OF_HYDRA]
        return cls(Path(main), job.job.config_name or cls().name, tuple(own))

    @classmethod
    def of_record(cls, said: Mapping[str, Any] | None) -> Configs:
        """Of a run, as :attr:`recorded` was. ConfigError: a folder isn't there any more."""
        configs = cls() if said is None else cls(Path(said["main"] or CONF), said["name"], tuple(said["own"]))
        missing = [folder for folder in (configs.main, *configs.folders) if not folder.is_dir()]
        if missing:
            fix = "put them back, or leave the changes out"
            raise ConfigError(f"{folder}: the run's own configs were there; {fix}" for folder in missing)
        return configs

    @property
    def recorded(self) -> dict[str, Any] | None:
        """What ``run.json`` has; None where nothing is of the user's own. conf/ may be elsewhere later."""
        main = None if self.main == CONF else str(self.main)
        return None if self == Configs() else {"main": main, "name": self.name, "own": list(self.own)}

    @property
    def folders(self) -> list[Path]:
        """Those of the user's own."""
        return [Path(place.removeprefix(_FILE)) for place in self.own if place.startswith(_FILE)]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, configs are composed."""
        with initialize_config_dir(str(self.main), version_base="1.3", job_name=self.name):
            if self.own:  # as Hydra's own command line does; hydra.searchpath is read too late for the first config
                path = create_config_search_path(str(self.main))
                for place in self.own:
                    path.prepend("command-line", place, SearchPathQuery(provider="schema"))
                GlobalHydra.instance().clear()
                Hydra.create_main_hydra2(self.name, path)
            yield

    def composed(self, overrides: Sequence[str], *, hydra: bool = False) -> DictConfig:
        """The config that a command line makes, if need be with Hydra's own part."""
        words = [word for word in overrides if not word.startswith(f"{_SEARCH_PATH}=")]  # it is known
        config = compose(self.name, overrides=words, return_hydra_config=True)
        return config if hydra else OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])

    def options(self) -> dict[str, list[str]]:
        """Of each group, the names of its options in folders. The user's may be in folders of their own there."""
        found = {
            folder.name: {file.stem for file in folder.glob("*.yaml")}
            for folder in self.main.iterdir()
            if folder.is_dir()
        }
        for own in self.folders:
            for file in own.glob("*/**/*.yaml"):
                group, *inside = file.relative_to(own).with_suffix("").parts
                found.setdefault(group, set()).add("/".join(inside))
        return {group: sorted(names) for group, names in found.items()}

    @property
    def are_listed(self) -> bool:
        """Are all options known? Those in packages aren't."""
        return len(self.folders) == len(self.own)

    def hidden(self) -> Problem | None:
        """A file of the user's own that isn't read, since the first folder has another one of its name."""
        for folder in self.folders:
            for file in sorted(folder.rglob("*.yaml")):
                first = self.main / file.relative_to(folder)
                if first.is_file() and first.read_text() != file.read_text():
                    fix = "give yours another name" + ", and add --config-name=NAME" * (file.parent == folder)
                    return Problem("--config-dir", folder, f"{file} is not read, but the one of the recipes", fix)
        return None

    def problem(self, group: str, option: object) -> Problem | None:
        """What is wrong with the user's own file of an option: it isn't meant as it is."""
        for folder in self.folders:
            file = folder / group / f"{option}.yaml"
            if file.is_file() and self.is_global(group) and not file.read_text().startswith(_GLOBAL):
                message = f"{file} would set values in a node {group}"
                return Problem(group, option, message, f"make its first line: {_GLOBAL}")
        return None

    def missing(self, error: MissingConfigException) -> Problem | str:
        """What Hydra says of an option that a file names, in a line, with the file."""
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if not error.options:
            return " ".join(str(error).split())
        files = (file for folder in self.folders for file in folder.rglob("*.yaml") if option in file.read_text())
        named = " or ".join(map(str, files))
        known = self.options().get(group, error.options)
        return Problem(group, option, f"no such {group}" + f", named in {named}" * bool(named), closest(option, known))

    def is_global(self, group: str) -> bool:
        """Do the group's options set values of other groups?"""
        files = list((self.main / group).glob("*.yaml"))
        return bool(files) and all(file.read_text().startswith(_GLOBAL) for file in files)


def _absolute(places: Iterable[Any]) -> tuple[str, ...]:
    found = (str(place) for place in places)
    return tuple(place if "://" in place else f"{_FILE}{Path(place).absolute()}" for place in found)
