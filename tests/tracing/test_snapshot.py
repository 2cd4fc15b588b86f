"""A step that is only looked at leaves no trace."""

from __future__ import annotations

import random
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from transformers.utils import ModelOutput

from lightning_parallel.absent.tensor import absent_like
from lightning_parallel.tracing.own_generators import GeneratorsWatched, globals_beside, is_own_generator
from lightning_parallel.tracing.snapshot import StateKept


class Meter:
    def __init__(self) -> None:
        self.sum: Any = 0.0
        self.history: list[Any] = []

    def update(self, value: Any) -> None:
        self.sum = self.sum + value
        self.history.append(value)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.loose = nn.Parameter(torch.ones(2))
        self.register_buffer("counter", torch.zeros(1))
        self.steps = 0
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        self.by_loader: list[list[Any]] = [[], []]
        self.recent: deque[Any] = deque([1], maxlen=2)
        self.names: set[str] = set()
        self.pair: tuple[list[Any], Meter] = ([], Meter())
        self.metric = MeanMetric()
        self.hidden = {"metric": MeanMetric(), "teacher": nn.Linear(2, 2)}
        self.space = SimpleNamespace(count=0)
        self.counts = np.zeros(2)
        self.generator = torch.Generator()
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.outcome = [ModelOutput(loss=1.0)]  # which doesn't let itself be cleared and filled
        self.queue: Queue[int] = Queue()  # a library's object, to which a thread may write
        self.itself: Any = {}
        self.itself["again"] = self.itself  # cycles are no danger

    def write(self, x: Any) -> None:
        self.steps += 1
        self.new = x
        self.outputs["train"].append(x)
        self.by_loader[1].append(x)
        self.recent.append(x)
        self.recent.append(x)
        self.names.add("a")
        self.pair[0].append(x)
        self.pair[1].update(x)
        self.metric.update(1.0)
        self.hidden["metric"].update(1.0)
        self.space.count += 1
        self.counts += 1
        torch.rand(1, generator=self.generator)
        self.loose = nn.Parameter(self.loose * 0.5)
        self.counter += 1  # type: ignore[operator]


def contents(module: Keeps) -> str:
    metrics = module.metric.update_count, module.hidden["metric"].update_count
    drawn = module.generator.get_state().sum()
    return repr([vars(module), vars(module.pair[1]), metrics, drawn])


def test_everything_is_put_back_to_any_depth_after_an_error_too() -> None:
    module = Keeps()
    before = contents(module)
    identities = [id(module.outputs), id(module.by_loader[1]), id(module.recent), id(module.loose)]
    with suppress(KeyError), StateKept(module):
        module.write(torch.ones(()))
        module.queue.put(1)
        assert contents(module) != before
        raise KeyError
    assert contents(module) == before
    assert module.queue.get_nowait() == 1
    assert identities == [id(module.outputs), id(module.by_loader[1]), id(module.recent), id(module.loose)]
    module.recent.append(2)
    assert list(module.recent) == [1, 2] and module.recent.maxlen == 2
    assert len(list(module.hidden["teacher"].parameters())) == 2


def test_what_cannot_be_put_back_is_told_and_stops_nothing() -> None:
    class Stubborn(dict[str, int]):
        def clear(self) -> None:
            raise TypeError("for ever")

    module = Keeps()
    module.stubborn = Stubborn(a=1)
    with pytest.warns(UserWarning, match="a Stubborn that can't be reset: for ever"), StateKept(module):
        module.stubborn["b"] = 2
        module.write(1.0)
    assert module.steps == 0 and module.by_loader == [[], []]


def test_absent_tensors_left_there_are_told_but_those_of_parts_that_stay_apart() -> None:
    module = Keeps()
    value: Tensor = absent_like(torch.ones(()), "the output of 'far'")
    module.layer.weight = absent_like(module.layer.weight, "a parameter")  # type: ignore[assignment]
    with StateKept(module, apart=[module.layer]) as state:
        module.layer.last = value
        assert list(state.written()) == []
        module.outputs["train"].append(1.0)
        module.by_loader[1].append({"value": value})
        module.new = value
        assert [tensor.origins for tensor in state.written()] == [frozenset({"the output of 'far'"})] * 2


def test_data_that_a_module_keeps_in_lists_is_not_copied_at_every_look() -> None:
    """A corpus of tokens, of which a list within a list has a thousand. What is less deep is found beside it."""
    module = nn.Module()
    module.corpus = [[0.5] * 1000 for _ in range(5000)]
    module.counts = {"train": [0]}
    tracemalloc.start()
    try:
        with StateKept(module):
            module.counts["train"].append(1)
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert module.counts == {"train": [0]}
    assert peak < 10e6  # bytes; a million items, where all are five


# -- generators of a user's own ----------------------------------------------------------------------------------------


GLOBAL = np.random.default_rng(5)

KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(3, generator=g).tolist()),
    "numpy": (lambda: np.random.default_rng(1), lambda g: g.random(3).tolist()),
    "numpy, legacy": (lambda: np.random.RandomState(1), lambda g: g.rand(3).tolist()),
    "python": (lambda: random.Random(1), lambda g: [g.random() for _ in range(3)]),
}


class Drawing(nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * GLOBAL.random()


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_told_and_undone_after_a_dry_run(kind: str) -> None:
    make, draw = KINDS[kind]
    module = Drawing(make())
    expected = draw(make()), GLOBAL.bit_generator.state
    with StateKept(module) as state:
        assert len(state.generators) == 2  # the global one too
        for also_draws in (draw, lambda _: module(torch.ones(1, 2))):
            watched = GeneratorsWatched(state.generators)
            assert not watched.drawn()
            also_draws(module.generator)
            assert watched.drawn()
    assert (draw(module.generator), GLOBAL.bit_generator.state) == expected


def test_global_ones_are_found_beside_the_classes_of_modules() -> None:
    assert list(globals_beside([Drawing(None)])) == [GLOBAL]
    assert list(globals_beside([nn.Linear(2, 2)])) == []


def test_default_generators_are_no_users_own_nor_those_without_a_state() -> None:
    defaults = [torch.default_generator, np.random.mtrand._rand, random._inst, random.SystemRandom()]
    assert not any(map(is_own_generator, defaults))
    module = Drawing(defaults)
    with StateKept(module) as state:
        assert state.generators == [GLOBAL]
