"""recipes/targets.py: a class that can't be found, isn't what its group needs, or doesn't take its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.recipes.test_configs import problems

HERE = "tests.recipes.test_targets"


class Mine(L.LightningModule):
    def __init__(self, width: int, optimizer: Any = None) -> None:
        super().__init__()


class MyData(L.LightningDataModule): ...


class MyOptimizer(torch.optim.SGD): ...


def make_data(size: int) -> MyData:
    return MyData()


NOT_A_CLASS = 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer._target_=torch.optim.AdamV"], "optimizer._target_=torch.optim.AdamV: torch.optim has no AdamV; "),
        (["optimizer._target_=torch.optim.AdaGrad"], "did you mean Adagrad?"),
        (["optimizer._target_=trch.optim.Adam"], "there is no module trch"),
        (["optimizer._target_=torch.nn.Linear"], "not what optimizer needs; name a subclass of torch's Optimizer"),
        (
            ["optimizer._target_=torch.optim.Adagrad", "~optimizer.betas", "+optimizer.eps_=1"],
            "optimizer.eps_=1: no ar",
        ),
        (["+model._target_=torch.nn.Linear"], "name a subclass of lightning's LightningModule"),
        (["+model._target_=my.Model"], "there is no module my"),
        ([f"+model._target_={HERE}.NOT_A_CLASS"], "not a class"),
        (["+data._target_=torch.nn.Linear"], "LightningDataModule"),
        (["strategy._target_=lightning_parallel.PipelineStrat"], "did you mean PipelineStrategy?"),
        (["+callbacks.mine._target_=lightning.pytorch.callbacks.EarlyStoping"], "did you mean EarlyStopping?"),
        (
            ["+callbacks.mine._target_=lightning.pytorch.callbacks.EarlyStopping"],
            "callbacks.mine.monitor=: lightning.p",
        ),
        (["+callbacks.checkpoint.save_tops=1"], "callbacks.checkpoint.save_tops=1: no argument of lightning"),
        (["logger.csv._target_=lightning.pytorch.callbacks.EarlyStopping"], "name a subclass of lightning's Logger"),
        (["+scheduler._target_=torch.optim.lr_scheduler.StepLR"], "know schedules by their names"),
        (["cluster._target_=my.Cluster"], "there is no module my"),
        (
            ["strategy=ddp", "strategy.timeout={_target_: datetime.timedeltas, minutes: 1}"],
            "did you mean timedelta?",
        ),
        (
            ["+callbacks.x={_target_: lightning.pytorch.Callback, sub: [{_target_: no.such.Thing}]}"],
            "there is no module no",
        ),
    ],
)
def test_a_class_that_cannot_be_made_is_told_with_what_is_wrong(overrides: list[str], said: str) -> None:
    found = problems(*overrides)
    assert sum(said in str(problem) for problem in found) == 1, found
    assert all("\n" not in str(problem) for problem in found)


def test_a_module_that_breaks_when_it_is_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written.py").write_text("import a_package_that_there_is_not\n")
    (tmp_path / "wrong_syntax.py").write_text("class Model(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = ["~model.name"]
    (problem,) = [p for p in problems("+model._target_=half_written.Model", *plain) if "_target_" in str(p)]
    assert "there is no module a_package_that_there_is_not" in str(problem)
    (problem,) = [p for p in problems("+model._target_=wrong_syntax.Model", *plain) if "_target_" in str(p)]
    assert "can't be imported: SyntaxError" in str(problem)


def own(*overrides: str) -> list[Any]:
    """With a model of the user's own."""
    keys = ["context", "layers", "heads", "vocab_size", "dropout", "tie_embeddings", "name"]
    return problems(f"+model._target_={HERE}.Mine", *(f"~model.{key}" for key in keys), *overrides)


def test_classes_of_the_users_own_are_checked_by_their_signatures() -> None:
    assert own("+model.optimizer=${optimizer}") == []
    (problem,) = own("+model.widht=3")
    assert "did you mean width?" in str(problem)
    (problem,) = own("~model.width")
    assert str(problem).startswith(f"model.width=: {HERE}.Mine needs it; set +model.width=VALUE")
    # Such a model does with the optimizer's and the scheduler's node as it likes, as long as the class is there.
    assert own("optimizer._target_=torch.optim.SGD", "+optimizer.mine=3") != []  # a kind that is known
    assert own(f"optimizer._target_={HERE}.MyOptimizer", "+optimizer.mine=3") == []
    (problem,) = own("optimizer._target_=my.Optimizer")
    assert "there is no module my" in str(problem)


def test_a_function_may_make_the_data() -> None:
    keys = ["name", "directory", "context", "val_windows", "batch_size", "workers"]
    without = [f"~data.{key}" for key in keys]
    assert problems(f"+data._target_={HERE}.make_data", "+data.size=3", *without) == []
    (problem,) = problems(f"+data._target_={HERE}.make_data", *without)
    assert str(problem).startswith("data.size=: ")
