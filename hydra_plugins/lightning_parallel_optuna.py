"""``hparams_search=optuna``: a sweep whose jobs Optuna chooses, one after the other, by the results of those before.

Hydra takes sweepers from the package ``hydra_plugins`` only, which is why it is here. It is imported at each start, so
Optuna and torch are imported when a search begins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
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

log = logging.getLogger(__name__)

# A word of each trial's command line. Its values are of the job, so it is the same for all.
_PRUNING = (
    "++callbacks.pruning={_target_:recipes.search.Pruning,folder:${hydra:sweep.dir},trial:${hydra:job.num},"
    "monitor:${optimized_metric},pruner:${hydra:sweeper.pruner}}"
)
_MOST_FAILURES = 3  # in a row: then it isn't the values that are wrong

Trials = list[tuple[int, Mapping[str, Any]]]  # numbers, and values by key


class OptunaSweeper(Sweeper):
    """Optuna's ask and tell around Hydra's launcher, which may run several trials at a time.

    Args:
        direction: what is to become of ``optimized_metric``.
        n_trials: of the whole search, those included that an earlier start of it has run.
        n_jobs: trials that are asked for at a time.
        sampler: what makes Optuna's sampler; None: Optuna's own.
        pruner: what makes the pruner, in the search and in each run; None: no run is ended early.
        params: the space, as on a command line, by key. The command line adds to it, and replaces.
    """

    def __init__(
        self,
        direction: Literal["minimize", "maximize"],
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
            WorkersFailed: several trials in a row have failed.
        """
        study, fixed, space = self._begin(arguments)
        failures = 0
        for trials in self._batches(study, space):
            for (number, _), job in zip(trials, self._run(trials, fixed), strict=True):
                failures = 0 if _tell(study, number, job, last=failures + 1 == _MOST_FAILURES) else failures + 1
        _report(study, self._folder)

    @property
    def _folder(self) -> Path:
        assert self.config is not None
        return Path(self.config.hydra.sweep.dir)

    def _begin(self, arguments: list[str]) -> tuple[Study, list[str], dict[str, BaseDistribution]]:
        from recipes.problem import ConfigError, Problem

        assert self.config is not None and self.hydra_context is not None
        if find_spec("optuna") is None:
            fix = 'pip install ".[recipes,optuna]"'
            raise ConfigError([Problem("hparams_search", "optuna", "Optuna is not installed", fix)])
        if self.config.optimized_metric is None:
            raise ConfigError([Problem("optimized_metric", None, "a search goes by a metric", "name one, as val_loss")])
        import optuna

        from recipes.search import split, study

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        try:
            fixed, space = split(parser.parse_overrides([*_lines(self._params), *arguments]))
        except ValueError as error:
            raise ConfigError([str(error)]) from None
        self._folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, self._folder / "multirun.yaml")
        sampler = None if self._sampler is None else instantiate(self._sampler)
        found = study(self._folder, self._direction, sampler, self._made_pruner())
        if found.get_trials(deepcopy=False):
            found.sampler.reseed_rng()  # it would choose the first values again
        if self._pruner is not None:
            fixed.append(_PRUNING)
        return found, fixed, space

    def _made_pruner(self) -> Any:
        import optuna

        return optuna.pruners.NopPruner() if self._pruner is None else instantiate(self._pruner)

    def _batches(self, study: Study, space: dict[str, BaseDistribution]) -> Iterator[Trials]:
        """Trials that an ended search has left, then new ones. The numbers in a batch follow each other."""
        from optuna.trial import TrialState

        for left in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if left.params.keys() == space.keys():
                yield [(left.number, left.params)]
            else:  # it was ended while it was asked for
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


def _lines(params: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in params.items()]


def _tell(study: Study, number: int, job: JobReturn, *, last: bool) -> bool:
    """Tell the study how a trial has ended. Did it succeed?

    Args:
        last: a failure is one too many.
    """
    from optuna.trial import TrialState

    from recipes import record
    from recipes.launchers.launcher import WorkersFailed
    from recipes.problem import ConfigError

    try:
        value = job.return_value
    except WorkersFailed as error:
        study.tell(number, state=TrialState.FAIL)
        if last:
            raise
        log.warning("trial %d: %s", number, error)
        return False
    if value is None:
        fix = "a search waits for each trial: use launch=true, and cluster.wait=true where there is such a setting"
        raise ConfigError([f"trial {number} has no result yet; {fix}"])
    assert isinstance(job.hydra_cfg, DictConfig)
    if record.read(Path(job.hydra_cfg.hydra.runtime.output_dir)).get("pruned_at") is not None:
        study.tell(number, state=TrialState.PRUNED)
    elif math.isnan(value):
        study.tell(number, state=TrialState.FAIL)
    else:
        study.tell(number, value)
    return not math.isnan(value)
