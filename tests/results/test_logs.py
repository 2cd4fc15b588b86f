"""Logging from microbatches: what Lightning's metrics show has to be what the whole batch would show."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.results.log_joins import LogJoins
from lightning_parallel.results.logs import LogRecorder, loggers_through


@pytest.mark.parametrize(("given", "whole", "expected", "warned"), [
    ([5, 3], 8, ([5, 3], 8), False),  # labels
    ([9, 9], 9, ([3, 2], 9), False),  # a setting, whatever the batch
    ([9, 9], 18, ([9, 9], 18), False),  # as many labels in fewer samples
    ([9, 9], None, ([3, 2], 5), False),
    ([7, 1], 8, ([7, 1], 8), False),
    ([7, 1], 7, ([7, 1], 8), True),  # clamp(min=1)
    ([7, 1], None, ([7, 1], 8), True),
    ([4, 2], 7, ([4, 2], 6), True),  # such as a half of the samples, rounded
    ([4, 2], None, ([4, 2], 6), False),
    ([2, 2], 6, ([3, 2], 5), True),
])  # fmt: skip
def test_a_batch_size_of_the_user_s_weighs_parts(
    given: list[int], whole: int | None, expected: tuple[list[int], int], warned: bool
) -> None:
    joins = LogJoins()
    for first in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights, size = joins.weigh("loss", [1.5, 0.0], [3, 2], given, lambda: whole)
        assert (weights, size) == expected
        assert len(caught) == (warned and first) and all("'loss', batch_size=" in str(each.message) for each in caught)


def test_a_batch_size_that_is_drawn_is_warned_of_once() -> None:
    told: list[str] = []
    joins = LogJoins(told.append)
    for given, whole in (([2, 2], 6), ([3, 2], 7), ([2, 4], 5)):
        joins.weigh("loss", [1.5, 0.5], [3, 3], given, lambda whole=whole: whole)  # type: ignore[misc]
    assert len(told) == 1


def test_a_first_batch_in_which_nothing_counts_makes_no_setting_of_a_count() -> None:
    joins = LogJoins()
    assert joins.weigh("loss", [0.0, 0.0], [2, 2], [0, 0], lambda: 0)[1] == 0
    assert joins.weigh("loss", [1.5, 0.5], [2, 2], [3, 3], lambda: 6) == ([3, 3], 6)


def test_a_setting_that_equals_the_microbatches_size_is_the_batch_s() -> None:
    joins = LogJoins()
    assert joins.weigh("loss", [1.5, 0.5], [4, 4], [4, 4], lambda: 4) == ([4, 4], 4)
    assert joins.weigh("loss", [1.5, 0.5], [1, 1], [4, 4], lambda: 4) == ([1, 1], 4)  # a smaller last batch


def test_parts_of_one_sample_in_which_nothing_counts_are_warned_of() -> None:
    joins, asked = LogJoins(), list[str]()

    def weigh(name: str, values: list[float], size: int) -> tuple[Any, int]:
        def whole() -> int:
            asked.append(name)
            return size

        return joins.weigh(name, values, [1, 1, 1], [1, 1, 1], whole)

    with pytest.warns(UserWarning, match="'loss', batch_size="):
        assert weigh("loss", [0.0, 1.5, 0.0], 1) == ([1, 1, 1], 3)  # clamp(min=1), or a setting of 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            assert weigh("loss", [0.0, 1.5, 0.0], 1) == ([1, 1, 1], 3)
            assert weigh("accuracy", [0.0, 1.0, 1.0], 3) == ([1, 1, 1], 3)
    assert asked.count("loss") == 1 and asked.count("accuracy") < 20  # each is a dry run of the step


def test_no_graph_is_kept_and_later_changes_in_place_do_not_show() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    recorder = LogRecorder()
    recorder.log("loss", loss)
    with torch.no_grad():
        loss.mul_(100)
    values = list[Any]()
    recorder.replay(lambda name, value, **_: values.append(value))
    (value,) = values
    assert value.item() == 2.0 and not value.requires_grad


@pytest.mark.parametrize("is_loss", [True, False])
def test_on_a_gpu_the_device_decides_whether_a_value_is_the_loss(
    is_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = BatchLoss([1, 1], given=[3.0, 1.0])
    losses = [torch.ones((), device="meta", requires_grad=True) * factor for factor in (1, 5)]
    for place, loss in enumerate(losses):
        batch.add(place, loss)
    answers = [batch.equal([loss.detach() for loss in losses]), batch.equal([1.0, 5.0])]
    assert all(isinstance(each, torch.Tensor) and each.is_meta for each in answers)
    assert batch.equal([losses[0]]) is batch.equal([torch.ones(2), losses[1]]) is batch.equal(["1", "5"]) is False
    monkeypatch.setattr(batch, "equal", lambda values: torch.tensor(is_loss))
    recorder = LogRecorder()
    for value in (1.0, 5.0):
        recorder.begin(1)
        recorder.log("number", value)
        recorder.log("tensor", torch.tensor(value))
    calls: dict[str, float] = {}
    recorder.replay(lambda name, value, **_: calls.update({name: float(value)}), batch)
    assert calls == dict.fromkeys(["number", "tensor"], 2.0 if is_loss else 3.0)


def test_a_trial_writes_to_no_logger_and_a_watched_step_is_noted() -> None:
    logger, noted = CSVLogger("."), list[int]()
    logger.log_metrics = MagicMock()  # type: ignore[method-assign]
    trainer = MagicMock(loggers=[logger])
    with loggers_through(trainer):
        (stand_in,) = trainer.loggers
        assert isinstance(stand_in, CSVLogger) and stand_in.save_dir == logger.save_dir
        stand_in.log_metrics({"x": 1.0})
        stand_in.experiment.add_image("x", None)
    assert trainer.loggers == [logger] and not logger.log_metrics.called
    with loggers_through(trainer, lambda: noted.append(1)):
        assert trainer.loggers[0].name and not noted
        trainer.loggers[0].log_metrics({"x": 1.0})
    assert noted and logger.log_metrics.call_count == 1
