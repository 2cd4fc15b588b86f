"""late/settings.py: settings are refused, warned of and described in figures that are right."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from lightning_parallel import AsyncPipelineStrategy
from lightning_parallel.late.settings import LateGradients


def late(**options: Any) -> LateGradients:
    usual = {"weights": "stash", "correction": "second_order", "lr_discount": None, "extra_in_flight": 0}
    return LateGradients(**{**usual, **options})


@pytest.mark.parametrize(("setting", "value"), [
    ("weights", "stashed"),
    ("correction", "first_order"),
    ("correction", -0.5),
    ("correction", float("nan")),
    ("correction", float("inf")),
    ("correction", True),
    ("lr_discount", 0),
    ("lr_discount", 1.5),
    ("lr_discount", True),
    ("extra_in_flight", -1),
    ("extra_in_flight", False),
])  # fmt: skip
def test_a_setting_that_there_is_not_is_refused_by_name(setting: str, value: Any) -> None:
    assert late(correction=0, lr_discount=1, extra_in_flight=2).correction == 0
    with pytest.raises(ValueError, match=f"{setting}={value!r}"):
        AsyncPipelineStrategy(**{setting: value})


def test_wanted_microbatches_leave_the_first_stage_less_than_half_an_update_late() -> None:
    assert late().wanted_microbatches(1) == 1
    for stages in (2, 3, 8):
        for extra in (0, 1, 2):
            rules = late(extra_in_flight=extra, correction=None)
            count = rules.wanted_microbatches(stages)
            assert rules.ahead(stages, 0) / count < 0.5 <= rules.ahead(stages, 0) / (count - stages * (1 + extra))


def test_the_description_says_how_late_and_how_many_copies() -> None:
    assert late().description(4, 3, 8) == "not late"
    assert late().description(4, 0, 8) == ("0.38 updates late, corrected, up to 2 more copies of the weights")
    assert late(correction=None).description(4, 2, 1) == "1 update late, up to 1 more copy of the weights"
    assert late(weights="latest", correction=None).description(4, 0, 1) == "3 updates late"


def test_stages_whose_gradients_are_late_start_slowly() -> None:
    rules = late(lr_discount=10)
    assert rules.rate_factor(5, 0, 1, 0) == 0.25 and rules.rate_factor(5, 0, 1, 10) == 1.0
    assert rules.rate_factor(5, 4, 1, 0) == rules.rate_factor(5, 0, 8, 0) == 1.0


@pytest.mark.parametrize(("rules", "stages", "microbatches", "words"), [
    (late(), 8, 16, []),
    (late(), 8, 8, []),
    (late(), 1, 1, []),
    (late(), 8, 1, ["1 microbatch an update", "7 updates late", "at least 16 samples"]),
    (late(correction=None), 8, 8, ["correction=None", "0.88 updates late", "correction='second_order'"]),
], ids=str)  # fmt: skip
def test_what_is_known_to_train_badly_is_warned_of(
    rules: LateGradients, stages: int, microbatches: int, words: list[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rules.check(stages, microbatches)
    messages = [str(each.message) for each in caught]
    assert len(messages) == bool(words)
    for message in messages:
        assert all(word in message for word in words), message


def test_two_versions_with_too_few_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights='2bw' with 6 microbatches.*at least 7"):
        late(weights="2bw").check(8, 6)
    late(weights="2bw").check(8, 7)
