"""What a search for hyperparameters needs of Optuna: the space, the study on disk, and the end of hopeless trials.

A trial is a run of a sweep, with the number of its job. The study is a file in the sweep's folder, which the search and
the runs write to; so a search that was ended goes on, and a run can be judged while it trains::

    search (hydra_plugins/lightning_parallel_optuna.py)        runs
      ask for values  --> study.journal                          0: recipes.train optimizer.lr=0.01
      tell the result --> study.journal <-- validation losses -- 1: recipes.train optimizer.lr=0.0003
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import CompactHydraException
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from recipes import record
from recipes.problem import ConfigError

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import JournalStorage

STUDY = "study.journal"  # a file in the sweep's folder
_NAME, _SETTINGS = "search", "settings"  # of the one study in it, and of what it was begun with


def split(overrides: Sequence[Override]) -> tuple[list[str], dict[str, BaseDistribution]]:
    """What all trials have in common, as words of a command line, and what each other key is drawn from. Of a key that
    is given twice, the last one counts.

    Raises:
        ValueError: nothing is searched, or a key by something else than values and ranges.
    """
    fixed, space = [], {}
    last = {each.key_or_group: each for each in overrides if not each.is_delete()}
    for each in overrides:
        if each.is_delete():
            fixed.append(str(each.input_line))
        elif last[each.key_or_group] is each and each.is_sweep_override():
            space[each.get_key_element()] = _distribution(each)
        elif last[each.key_or_group] is each:
            fixed.append(str(each.input_line))
    if not space:
        raise ValueError("there is nothing to search; give a range, such as 'optimizer.lr=interval(0.0001, 0.01)'")
    return fixed, space


def _distribution(each: Override) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = each.value()
    tags: set[str] = getattr(value, "tags", set())
    try:
        if tags and not (isinstance(value, IntervalSweep) and tags == {"log"}):
            raise ValueError("the only tag is log, of an interval")
        match value:
            case ChoiceSweep():  # as words of the command line, which all values can be written as
                return CategoricalDistribution([str(word) for word in each.sweep_string_iterator()])
            case RangeSweep() as steps:
                values = [float(value) for value in steps.range()]
                if not values:
                    raise ValueError("there is nothing in it")
                low, high, step = values[0], values[-1], float(steps.step)
                if low.is_integer() and step.is_integer():
                    return IntDistribution(int(low), int(high), step=int(step))
                return FloatDistribution(low, high, step=step)
            case IntervalSweep(start=start, end=end) if start is not None and end is not None:
                if isinstance(start, int) and isinstance(end, int):
                    return IntDistribution(start, end, log="log" in tags)
                return FloatDistribution(start, end, log="log" in tags)
        raise ValueError("a search takes values, choice(), range() and interval()")
    except ValueError as error:
        raise ValueError(f"{each.input_line}: {error}") from None


def words(values: Mapping[str, Any]) -> list[str]:
    """Values by key, such as those of a trial, for a command line."""
    return [f"{key}={value}" for key, value in values.items()]


def study(
    folder: Path,
    direction: Literal["minimize", "maximize"],
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
) -> Study:
    """The study in the folder of a sweep, a new one if there is none; None takes Optuna's own sampler and pruner.

    Raises:
        ConfigError: there is one that can't be read.
    """
    from optuna import create_study

    try:
        return create_study(
            storage=_storage(folder), study_name=_NAME, direction=direction, sampler=sampler, pruner=pruner,
            load_if_exists=True,
        )  # fmt: skip
    except (ValueError, KeyError) as error:
        raise ConfigError([f"{folder / STUDY} can't be read ({error}); delete it, or use another folder"]) from error


def begin(found: Study, settings: Mapping[str, Any]) -> None:
    """Keep the settings that a search was begun with. ConfigError: a search that goes on has others."""
    known = found.user_attrs.get(_SETTINGS)
    if known is None:
        return found.set_user_attr(_SETTINGS, dict(settings))
    other = [name for name, value in settings.items() if known.get(name) != value]
    if other:
        told = (f"{name}: {settings[name]} now, {known.get(name)} in the study" for name in other)
        raise ConfigError([f"{each}; use the same, or another hydra.sweep.dir" for each in told])


def _storage(folder: Path) -> JournalStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    # Absolute: the lock is a link to this path. A dangling link has no age, so a lock left by a killed process would
    # never be broken.
    return JournalStorage(JournalFileBackend(str((folder / STUDY).absolute())))


class TrialsFailed(CompactHydraException):
    """Trials have failed without an error of their own."""


class Pruning(Callback):
    """Tells the study in a sweep's folder each validation's value, and ends a run that the pruner gives no chance.

    Such a run is complete, with the metrics that it had; ``run.json`` has the step as ``pruned_at``. ``trial`` is the
    number of this run.
    """

    def __init__(self, folder: str, trial: int, monitor: str, pruner: BasePruner) -> None:
        self._folder, self._number, self._monitor, self._pruner = Path(folder), trial, monitor, pruner

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        hopeless = trainer.is_global_zero and self._is_hopeless(trainer)
        if trainer.strategy.reduce_boolean_decision(hopeless, all=False):
            trainer.should_stop = True
            rank_zero_info(f"Pruned after step {trainer.global_step}: {self._monitor} is worse than in other trials.")
            if trainer.is_global_zero:
                record.update(Path(trainer.default_root_dir), pruned_at=trainer.global_step)

    def _is_hopeless(self, trainer: L.Trainer) -> bool:
        """Only rank 0 asks, and the others wait for it: a study that can't be read or written must not end the run."""
        from optuna import load_study

        value, step = trainer.callback_metrics.get(self._monitor), trainer.global_step
        if value is None:
            return False
        try:
            storage = _storage(self._folder)
            study_id = storage.get_study_id_from_name(_NAME)
            trial = storage.get_trial_id_from_study_id_trial_number(study_id, self._number)
            if storage.get_trial(trial).state.is_finished():  # the trial is over: this run only repeats it
                return False
            storage.set_trial_intermediate_value(trial, step, float(value))
            found, frozen = load_study(study_name=_NAME, storage=storage), copy(storage.get_trial(trial))
            # Of a run that was started again there may be later values.
            values = frozen.intermediate_values.items()
            frozen.intermediate_values = {past: each for past, each in values if past <= step}
            return self._pruner.prune(found, frozen)
        except Exception as error:
            rank_zero_warn(f"Not pruned: {self._folder / STUDY}: {error}")
            return False
