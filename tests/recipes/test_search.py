"""hparams_search=optuna: trials by the results of those before, on disk; what was ended goes on."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import MedianPruner

from hydra_plugins.lightning_parallel_optuna import OptunaSweeper
from recipes import CONF, record
from recipes.compose import check, jobs
from recipes.launchers.launcher import Failure, WorkersFailed
from recipes.problem import ConfigError
from recipes.search import Pruning, TrialsFailed, split, study

TRIALS = 5
Objective = Callable[[int, float], Any]
Launched = list[tuple[int, float]]  # the numbers of trials, and what they were tried with
Search = Callable[..., Launched]


def parsed(*words: str) -> Any:
    return OverridesParser.create().parse_overrides(list(words))


@pytest.mark.parametrize(("word", "distribution"), [
    ("a=interval(1, 2)", FloatDistribution(1, 2)),
    ("a=tag(log, interval(0.1, 2))", FloatDistribution(0.1, 2, log=True)),
    ("a=int(interval(16, 64))", IntDistribution(16, 64)),
    ("a=range(1, 9, 2)", IntDistribution(1, 7, step=2)),
    ("a=range(0.5, 2.0, 0.5)", FloatDistribution(0.5, 1.5, step=0.5)),
    ("a=choice(16, true, [1, 2])", CategoricalDistribution(["16", "True", "[1,2]"])),
    ("a=ddp,fsdp", CategoricalDistribution(["ddp", "fsdp"])),
])  # fmt: skip
def test_a_range_means_what_it_means_in_a_sweep(word: str, distribution: BaseDistribution) -> None:
    """``range`` leaves out its end, as Hydra's own sweeper does."""
    assert split(parsed(word, "b=1")) == (["b=1"], {"a": distribution})


def test_the_last_word_on_a_key_counts() -> None:
    fixed, space = split(parsed("a=interval(1, 2)", "b=interval(1, 2)", "a=3"))
    assert fixed == ["a=3"] and space == {"b": FloatDistribution(1, 2)}
    fixed, _ = split(parsed("~c", "+c.d=1", "b=interval(1, 2)"))
    assert fixed == ["~c", "+c.d=1"]


@pytest.mark.parametrize(("word", "said"), [
    ("a=1", "nothing to search"), ("a=glob(*)", r"a=glob\(\*\): a search takes values"), ("a=range(5, 1)", "a=range"),
    ("a=interval(2, 1)", "a=interval"), ("a=tag(lgo, interval(1, 2))", "the only tag is log"),
    ("a=tag(log, range(1, 9))", "the only tag is log, of an interval"),
])  # fmt: skip
def test_what_cannot_be_searched_is_refused(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split(parsed(word))


def test_the_ends_of_ranges_are_checked_before_the_first_trial() -> None:
    words = ["hparams_search=optuna", "model.width=int(interval(0, 64))", "model.dropout=interval(0.0, 2.0)"]
    said = sorted(map(str, check(words)))
    assert [each.split(":")[0] for each in said] == ["model.dropout=2.0", "model.width=0"]
    # More combinations than are looked at.
    many = parsed("a=interval(0.0, 2.0)", *(f"{key}=choice(1,2,3)" for key in "bcde"))
    assert any("a=2.0" in words for words in jobs(many, one_change_each=True))
    (said,) = map(str, check(["hparams_search=optuna", "hydra.sweeper.n_trials=1", "optimizer.lr=-1"]))
    assert said.startswith("optimizer.lr=-1: not a value")  # in place of the range that the search has


# -- the search, with runs that are only a formula --------------------------------------------------------------------


class Formula(Launcher):
    """Launches nothing: the result of a job is that of a function of its number and learning rate."""

    def __init__(self, folder: Path, objective: Objective, launched: Launched) -> None:
        self.folder, self.objective, self.launched = folder, objective, launched

    def setup(self, **_: Any) -> None: ...

    def launch(self, batch: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        return [self._run(initial_job_idx + place, list(words)) for place, words in enumerate(batch)]

    def _run(self, number: int, words: list[str]) -> JobReturn:
        lr = float(next(word for word in words if word.startswith("optimizer.lr=")).partition("=")[2])
        self.launched.append((number, lr))
        job = OmegaConf.create({"hydra": {"runtime": {"output_dir": str(self.folder / str(number))}}})
        try:
            return JobReturn(hydra_cfg=job, _return_value=self.objective(number, lr), status=JobStatus.COMPLETED)
        except (WorkersFailed, ConfigError) as error:
            return JobReturn(hydra_cfg=job, _return_value=error, status=JobStatus.FAILED)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    """Searches in a folder of the test's own, ten trials of a learning rate; what was launched."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = ["hparams_search=optuna", f"hydra.sweep.dir={tmp_path}"]
        config = compose("train", overrides=words, return_hydra_config=True)
        context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=None)  # type: ignore[arg-type]

        def run(objective: Objective, launched: Launched | None = None, **settings: Any) -> Launched:
            launched = [] if launched is None else launched
            node = OmegaConf.merge(config.hydra.sweeper, {"n_trials": TRIALS, **settings})
            sweeper = OptunaSweeper(**{key: node[key] for key in node if key not in ("_target_", "_recursive_")})
            sweeper.hydra_context, sweeper.config = context, config
            sweeper.launcher = Formula(tmp_path, objective, launched)
            sweeper.sweep(["strategy=single"])
            return launched

        yield run


def distance(_: int, lr: float) -> float:
    return abs(math.log10(lr) + 3)  # best at 0.001


def test_a_search_that_was_ended_goes_on(search: Search) -> None:
    """It runs the trial again that was ended, and doesn't choose the same values once more."""

    def interrupted(number: int, lr: float) -> float:
        if number == 2:
            raise KeyboardInterrupt
        return distance(number, lr)

    first: Launched = []
    with pytest.raises(KeyboardInterrupt):
        search(interrupted, first)
    rest = search(distance)
    assert [number for number, _ in first] == [0, 1, 2] and [number for number, _ in rest] == list(range(2, TRIALS))
    assert rest[0] == first[2] and len({lr for _, lr in first + rest}) == TRIALS
    assert search(distance) == []  # it has all


@pytest.mark.parametrize(("error", "said"), [
    (WorkersFailed(Failure(0, "killed", None), 1), "killed"), (ConfigError(["no"]), "no"), (None, "not a finite number")
])  # fmt: skip
def test_three_in_a_row_end_the_search(search: Search, error: Exception | None, said: str) -> None:
    def fails(number: int, lr: float) -> float:
        if number < 2 or error is None:
            return math.nan
        raise error

    launched: Launched = []
    with pytest.raises((WorkersFailed, ConfigError, TrialsFailed), match=said):
        search(fails, launched)
    assert len(launched) == 3


def test_a_search_that_cannot_begin_or_go_on_says_why(search: Search, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trial 0 has no result"):
        search(lambda number, lr: None)
    search(distance, n_trials=2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"n_jobs": 0}, r"hydra\.sweeper\.n_jobs=0: not a value"), ({"direction": "max"}, "give minimize or maximize"),
        ({"direction": "maximize"}, "direction: maximize now, minimize in the study; use the same, or another"),
        ({"params": {"optimizer.lr": "interval(0.1, 0.2)"}}, "searched: "),
    ]  # fmt: skip
    for settings, said in wrong:
        with pytest.raises(ConfigError, match=said):
            search(distance, **settings)
    assert len(study(tmp_path, "minimize").get_trials()) == 2
    with (tmp_path / "search.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another search is going on there"):
            search(distance)


def test_a_pruned_run_is_not_among_the_best(search: Search, tmp_path: Path) -> None:
    def pruned(number: int, lr: float) -> float:
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / record.RUN).write_text(json.dumps({"pruned_at": 5 if number else None}))
        return -number

    search(pruned, n_trials=3)
    assert study(tmp_path, "minimize").best_trial.number == 0


# -- a run that is judged while it trains ------------------------------------------------------------------------------


class Model(BoringModel):
    """Its validation loss is as the test wants it."""

    def __init__(self, losses: Sequence[float]) -> None:
        super().__init__()
        self.losses = iter(losses)

    def validation_step(self, *_: Any) -> None: ...

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", next(self.losses))


def train(folder: Path, number: int, losses: Sequence[float]) -> L.Trainer:
    """A run of a trial, which validates after every second step."""
    run = folder / str(number)
    run.mkdir(exist_ok=True)
    (run / record.RUN).write_text("{}")
    pruning = Pruning(str(folder), number, "val_loss", MedianPruner(n_startup_trials=2, n_warmup_steps=3))
    trainer = L.Trainer(
        default_root_dir=run, callbacks=[pruning], max_steps=8, val_check_interval=2, limit_val_batches=1,
        num_sanity_val_steps=0, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(losses))
    return trainer


def test_a_run_that_is_worse_than_most_is_ended_and_others_are_not(tmp_path: Path) -> None:
    found = study(tmp_path, "minimize")
    for number, losses in enumerate([[5, 4, 3, 2], [5, 4, 3, 2]]):
        found.ask({"a": FloatDistribution(0, 1)})
        assert train(tmp_path, number, losses).global_step == 8
        found.tell(number, losses[-1])
    found.ask({"a": FloatDistribution(0, 1)})
    assert train(tmp_path, 2, [9, 4, 8, 1]).global_step == 6
    assert record.read(tmp_path / "2") == {"pruned_at": 6}
    assert study(tmp_path, "minimize").get_trials()[2].intermediate_values == {2: 9, 4: 4, 6: 8}
    assert train(tmp_path, 1, [9, 9, 9, 9]).global_step == 8  # again, after its trial: it is a run like others


def test_a_run_goes_on_without_its_study(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert train(tmp_path, 0, [5, 4, 3, 2]).global_step == 8
    assert any("Not pruned" in str(warning.message) for warning in recwarn)
