"""settings.py, values.py: a constructor takes the fields of a dataclass, says so in its signature, and refuses other
values; the line that errors name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal

import pytest

from lightning_parallel.settings import (
    SET_BY_TRAINER,
    Auto,
    Count,
    Natural,
    NotNegative,
    Range,
    check,
    fits,
    nearest,
    takes,
)
from lightning_parallel.values import line_outside

Fraction = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, kw_only=True)
class Common:
    """What all take.

    Args:
        patience: how long to wait,
            in seconds.
        plugin: filled in.
    """

    patience: float | timedelta = 3
    plugin: Any = field(default=None, metadata=SET_BY_TRAINER)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Own(Common):
    """What one takes.

    Args:
        size: how large.

    Example: not an argument.
    """

    size: Count | Auto = "auto"
    mode: Literal["slow", "quick"] | Callable[[int], int] = "slow"


class Machine:
    @takes(Own)
    def __init__(self, options: Own) -> None:
        self.options = options


@pytest.mark.parametrize(("value", "hint", "right"), [
    (1, Count, True), (0, Count, False), (True, Count, False), (1.0, Count, False), ("1", Count, False),
    (0, Natural, True), (-1, Natural, False), (0.5, Fraction, True), (1.5, Fraction, False),
    (float("nan"), NotNegative, False), (float("inf"), float, False), (2, float, True), (True, float, False),
    (False, bool, True), (0, bool, False), ("auto", Count | Auto, True), ("aut", Count | Auto, False),
    (1, Literal["a", 1], True), (True, Literal["a", 1], False),
    (["a"], Sequence[str], True), (("a",), Sequence[str], True), ("a", Sequence[str], False),
    ([1, 2], list[Count], True), ([1, 0], list[Count], False), ((1,), list[Count], False),
    ({"a": 1}, Mapping[str, int], True), ({"a": "b"}, Mapping[str, int], False),
    (len, Callable[[int], int], True), (3, Callable[[int], int], False),
    (None, Count | None, True), (timedelta(1), float | timedelta, True), (object(), Any, True),
])  # fmt: skip
def test_a_value_fits_a_type_or_does_not(value: Any, hint: Any, right: bool) -> None:
    assert fits(value, hint) is right


def test_a_constructor_takes_the_fields_and_shows_them_with_its_own_first() -> None:
    assert Machine(size=3).options == Own(size=3) and Machine().options == Own()
    parameters = inspect.signature(Machine).parameters
    assert list(parameters) == ["size", "mode", "patience", "plugin"]
    assert parameters["size"].default == "auto" and parameters["size"].annotation == (int | Auto)
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters.values())
    text = inspect.getdoc(Machine.__init__) or ""
    assert text.index("size: how large.") < text.index("patience: how long to wait,") and "Example" not in text


def test_a_wrong_value_and_an_unknown_setting_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"size=0: give an integer of at least 1, or 'auto'\."):
        Machine(size=0)
    with pytest.raises(
        ValueError, match=r"mode='quik': give 'slow' or 'quick', or a function\. Did you mean 'quick'\?"
    ):
        Machine(mode="quik")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Machine has no setting 'sise'\. Did you mean 'size'\?"):
        Machine(sise=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Machine has no setting 'colour'\.$"):
        Machine(colour=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"by their names, as in mode='slow'\."):
        Machine("slow")  # type: ignore[misc]


STRATEGY = ["sequence_parallel", "tensor_parallel", "data_parallel", "stages", "chunks", "microbatches", "plan"]
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "zbv"]


@pytest.mark.parametrize(("wrong", "known", "meant"), [
    ("pipeline_parallel", STRATEGY, "stages"), ("pipeline_parallel_degree", STRATEGY, "stages"),
    ("pp_size", STRATEGY, "stages"), ("num_stages", STRATEGY, "stages"), ("tp_size", STRATEGY, "tensor_parallel"),
    ("tensor_model_parallel_size", STRATEGY, "tensor_parallel"), ("dp_shard_size", STRATEGY, "data_parallel"),
    ("virtual_pipeline_model_parallel_size", STRATEGY, "chunks"), ("num_microbatches", STRATEGY, "microbatches"),
    ("sequence_paralel", STRATEGY, "sequence_parallel"), ("colour", STRATEGY, None),
    ("1F1B", SCHEDULES, "1f1b"), ("Interleaved1F1B", SCHEDULES, "interleaved"), ("ZBVZeroBubble", SCHEDULES, "zbv"),
])  # fmt: skip
def test_other_frameworks_names_are_understood(wrong: str, known: list[str], meant: str | None) -> None:
    assert nearest(wrong, known) == meant


def test_the_line_that_runs_is_named() -> None:
    assert line_outside(()).startswith("values.py:")
    assert line_outside(("lightning_parallel",)).startswith("test_settings.py:")


def test_a_thread_of_libraries_alone_has_no_line() -> None:
    class Everything:
        def __contains__(self, package: object) -> bool:
            return True

    assert line_outside(Everything()) == "Something"
