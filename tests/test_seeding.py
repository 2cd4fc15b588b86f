"""Random numbers of the model are its own: nobody else's draws move them, and they move nobody else's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_parallel.seeding import Generators, mix, random_state, restore_random_state

GENERATORS = Generators(torch.device("cpu"))


def test_a_layer_that_runs_again_from_the_same_state_is_followed_by_the_same_seed() -> None:
    with GENERATORS.seeded(1):
        torch.rand(3)
        state, seed = torch.get_rng_state(), mix(torch.initial_seed(), "layer")
        GENERATORS.seed(seed)
        assert mix(torch.initial_seed(), "layer") != seed
        torch.set_rng_state(state)
        assert mix(torch.initial_seed(), "layer") == seed != mix(torch.initial_seed(), "another, inside of it")


@pytest.mark.gpu
def test_the_generator_of_the_gpu_too() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.manual_seed(1)
    expected = torch.rand(4, device=device)
    torch.cuda.manual_seed(1)
    with Generators(device).seeded(5):
        one = torch.rand(4, device=device)
    with Generators(device).seeded(5):
        other = torch.rand(4, device=device)
    assert torch.equal(one, other)
    assert torch.equal(torch.rand(4, device=device), expected)


# -- in checkpoints ----------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randn(3).tolist(),
    "python": lambda: [random.random(), random.gauss(0, 1)],
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy, one of a pair of normals": lambda: np.random.randn(1).tolist(),
}


@pytest.fixture(autouse=True)
def _generators_kept() -> Iterator[None]:
    state = random_state()
    yield
    restore_random_state(state)


@pytest.mark.parametrize("kind", DRAWS)
def test_the_next_numbers_are_the_same(kind: str) -> None:
    draw = DRAWS[kind]
    draw()
    state = {name: tensor.clone() for name, tensor in random_state().items()}
    expected = [draw() for _ in range(3)]
    draw()
    restore_random_state(state)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("kind", DRAWS)
def test_what_draws_from_seeded_generators_moves_nobody_else_s(kind: str) -> None:
    draw, state = DRAWS[kind], random_state()
    expected = draw()
    restore_random_state(state)
    with GENERATORS.seeded(5):
        one = draw()
    with GENERATORS.seeded(5):
        assert draw() == one != expected
    assert draw() == expected
