"""Generators of a user's own: put back, found where they are global, and told when they are drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.tracing.own_generators import (
    GeneratorsWatched,
    globals_beside,
    is_own_generator,
)
from lightning_parallel.tracing.snapshot import StateKept

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
