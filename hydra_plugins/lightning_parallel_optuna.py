"""``hparams_search=optuna``: a sweep whose jobs Optuna chooses, one after the other, by the results of those before.

Hydra takes sweepers from the package ``hydra_plugins`` only, which is why it is here. It is imported at each start, so
Optuna and torch are imported when a search begins.
"""

from __future__ import annotations

import fcntl
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

    from recipes.problem import Problem

log = logging.getLogger(__name__)

# Added to each trial's command line. It is the same for all trials: what differs is filled in when the job starts.
_PRUNING = (
    "++callbacks.pruning={{_target_:recipes.search.Pruning,folder:'{folder}',trial:${{hydra:job.num}},"
    "monitor:${{optimized_metric}},pruner:${{hydra:sweeper.pruner}}}}"
)
_MOST_FAILURES = 3  # in a row: then it isn't the values that are wrong

Trials = list[tuple[int, Mapping[str, Any]]]  # numbers, and values by key


class OptunaSweeper(Sweeper):
    """Optuna's ask and tell around Hydra's launcher, which may run several trials at a time.

    Args:
        direction: ``"minimize"`` or ``"maximize"`` the ``optimized_metric``; None: its name tells, as of a loss.
        n_trials: of the whole search, those included that an earlier start of it has run.
        n_jobs: trials that are asked for at a time.
        sampler: what makes Optuna's sampler; None: Optuna's own.
        pruner: what makes the pruner, in the search and in each run; None: no run is ended early.
        params: the space, as on a command line, by key. The command line adds to it, and replaces.
    """

    def __init__(
        self,
        direction: Literal["minimize", "maximize"] | None,
        n_trials: int,
        n_jobs: int,
        sampler: DictConfig | None,
        pruner: DictConfig | None,
        params: Mapping[str, str] | None,
    ) -> None:
        self._direction, self._n_trials, self._n_jobs = direction, n_trials, n_jobs
        self._sampler, self._pruner, self._params = sampler, pruner, params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run trials until there are enough.

        Raises:
            ConfigError: it can't begin.
            WorkersFailed: several trials in a row have failed, the last with this error.
            TrialsFailed: so they have, the last with a metric that isn't finite.
        """
        fixed, space = self._checked(arguments)
        self._folder.mkdir(parents=True, exist_ok=True)
        with _alone(self._folder):
            study = self._begun(fixed, space)
            failures = 0
            for trials in self._batches(study, space):
                for (number, _), job in zip(trials, self._run(trials, fixed), strict=True):
                    error = _tell(study, number, job)
                    failures = 0 if error is None else failures + 1
                    if error is not None and failures >= _MOST_FAILURES:
                        raise error
            _report(study, self._folder)

    @property
    def _folder(self) -> Path:
        assert self.config is not None
        return Path(self.config.hydra.sweep.dir)

    def _checked(self, arguments: list[str]) -> tuple[list[str], dict[str, BaseDistribution]]:
        """What all trials have in common, and the space.

        Raises:
            ConfigError: the search can't begin.
        """
        from recipes.problem import ConfigError

        assert self.config is not None and self.hydra_context is not None
        problems = list(self._problems(self.config))
        if problems:
            raise ConfigError(problems)
        from recipes.search import split, words

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        try:
            fixed, space = split(parser.parse_overrides([*words(self._params), *arguments]))
        except ValueError as error:
            raise ConfigError([str(error)]) from None
        pruning = [_PRUNING.format(folder=self._folder.absolute())] if self._pruner is not None else []
        return [*fixed, *pruning], space

    def _begun(self, fixed: Sequence[str], space: Mapping[str, BaseDistribution]) -> Study:
        """The study, a new one or one that goes on.

        Raises:
            ConfigError: it was begun otherwise, or can't be read.
        """
        import optuna

        from recipes.report import direction_of
        from recipes.search import begin, study

        assert self.config is not None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        metric = self.config.optimized_metric
        direction = self._direction or direction_of(metric)
        assert direction is not None  # it would be a problem
        sampler = None if self._sampler is None else instantiate(self._sampler)
        found = study(self._folder, direction, sampler, self._made_pruner())
        settings = {
            "direction": direction,
            "optimized_metric": metric,
            "common": sorted(fixed),
            "searched": {key: repr(distribution) for key, distribution in space.items()},
            "pruner": None if self._pruner is None else OmegaConf.to_container(self._pruner),
        }
        begin(found, settings)
        OmegaConf.save(self.config, self._folder / "multirun.yaml")
        if found.get_trials(deepcopy=False):
            found.sampler.reseed_rng()  # it would choose the first values again
        return found

    def _problems(self, config: DictConfig) -> Iterator[Problem]:
        """What keeps a search from beginning."""
        from recipes.problem import Problem
        from recipes.processes import joined
        from recipes.report import direction_of

        if find_spec("optuna") is None:
            fix = 'pip install ".[recipes,optuna]"'
            yield Problem("hparams_search", "optuna", "Optuna is not installed", fix)
        if joined():
            fix = "call it without torchrun, with another cluster"
            yield Problem("hparams_search", "optuna", "a search starts the processes of each trial", fix)
        waits = {"launch": True, "cluster.wait": True, "cluster.submit": True}
        for key, needed in waits.items():
            value = OmegaConf.select(config, key, default=needed)
            if value != needed:
                yield Problem(key, value, "a search waits for the result of each trial", f"use {key}=true")
        if str(config.cluster._target_).endswith(".KubernetesLauncher"):
            yield Problem("cluster", "kubernetes", "a search waits for the result of each trial", "use another one")
        for name, count in (("n_trials", self._n_trials), ("n_jobs", self._n_jobs)):
            if not isinstance(count, int) or count < 1:
                fix = "give an integer of at least 1"
                yield Problem(f"hydra.sweeper.{name}", count, "not a value it can have", fix)
        if config.optimized_metric is None:
            yield Problem("optimized_metric", None, "a search goes by a metric", "name one, as val_loss")
        elif self._direction not in ("minimize", "maximize", None):
            fix = "give minimize or maximize"
            yield Problem("hydra.sweeper.direction", self._direction, "not a value it can have", fix)
        elif self._direction is None and direction_of(config.optimized_metric) is None:
            message = f"it can't be told of {config.optimized_metric}"
            yield Problem("hydra.sweeper.direction", None, message, "give minimize or maximize")

    def _made_pruner(self) -> Any:
        import optuna

        return optuna.pruners.NopPruner() if self._pruner is None else instantiate(self._pruner)

    def _batches(self, study: Study, space: dict[str, BaseDistribution]) -> Iterator[Trials]:
        """Trials that an ended search has left, then new ones. The numbers in a batch follow each other."""
        from optuna.trial import TrialState

        for left in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if left.params.keys() == space.keys():
                yield [(left.number, left.params)]
            else:  # the search ended while this trial's values were being chosen
                study.tell(left.number, state=TrialState.FAIL)
        while (there := len(study.get_trials(deepcopy=False))) < self._n_trials:
            asked = [study.ask(space) for _ in range(min(self._n_jobs, self._n_trials - there))]
            yield [(trial.number, trial.params) for trial in asked]

    def _run(self, trials: Trials, fixed: Sequence[str]) -> Sequence[JobReturn]:
        from recipes.search import words

        assert self.launcher is not None
        batch = [[*fixed, *words(values)] for _, values in trials]
        self.validate_batch_is_legal(batch)
        return self.launcher.launch(batch, initial_job_idx=trials[0][0])


def _report(study: Study, folder: Path) -> None:
    from optuna.trial import TrialState

    from recipes.search import words

    if study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
        best = study.best_trial
        log.info("best: %.4g with %s; see %s", best.value, " ".join(words(best.params)), folder / str(best.number))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While it is entered, no other search may work in the folder: it would run the same trials, in the same folders.

    Raises:
        ConfigError: there is one.
    """
    from recipes.problem import ConfigError

    with (folder / "search.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError([f"{folder}: another search is going on there; use another hydra.sweep.dir"]) from None
        except OSError as error:  # a file system without such locks
            log.warning("%s: whether another search is going on there can't be told (%s)", folder, error)
        yield


def _tell(study: Study, number: int, job: JobReturn) -> Exception | None:
    """Tell the study how a trial has ended. Returns why it failed, if it did."""
    from optuna.trial import TrialState

    from recipes import record
    from recipes.launchers.launcher import WorkersFailed
    from recipes.problem import ConfigError
    from recipes.search import TrialsFailed

    try:
        value = job.return_value
    except (WorkersFailed, ConfigError) as error:  # of these values, until there are several in a row
        study.tell(number, state=TrialState.FAIL)
        log.warning("trial %d: %s", number, error)
        return error
    if value is None:
        raise ConfigError([f"trial {number} has no result: a search waits for that of each trial"])
    assert isinstance(job.hydra_cfg, DictConfig)
    if record.read(Path(job.hydra_cfg.hydra.runtime.output_dir)).get("pruned_at") is not None:
        study.tell(number, state=TrialState.PRUNED)
    elif math.isnan(value):
        study.tell(number, state=TrialState.FAIL)
        return TrialsFailed(f"trial {number} and those before it: the metric is not a finite number")
    else:
        study.tell(number, value)
    return None
