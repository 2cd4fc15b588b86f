"""Generators go on after a restore as they would have gone on, whatever was drawn before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_parallel.seeding import random_state, restore_random_state

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randn(3).tolist(),
    "python": lambda: [random.random(), random.gauss(0, 1)],
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy, one of a pair of normals": lambda: np.random.randn(1).tolist(),
}


@pytest.fixture(autouse=True)
def generators_kept() -> Iterator[None]:
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


@pytest.mark.parametrize("kind", DRAWS)
def test_the_next_numbers_are_the_same(kind: str) -> None:
    draw = DRAWS[kind]
    draw()
    state = {name: tensor.clone() for name, tensor in random_state().items()}
    expected = [draw() for _ in range(3)]
    draw()
    restore_random_state(state)
    assert [draw() for _ in range(3)] == expected


def test_what_a_state_lacks_stays() -> None:
    state = {name: tensor for name, tensor in random_state().items() if name != "torch"}
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    restore_random_state(state)
    assert torch.rand(2).tolist() == expected
