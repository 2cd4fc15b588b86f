"""Random numbers of the model, kept apart from those of the data.

Every stage loads the same batches, so the global generators, from which samplers and augmentations draw, must stay
equal on all stages. Dropout masks are drawn on one stage only, so they must not move these generators. Therefore each
microbatch's forward runs with generators of its own, seeded from what the microbatch is::

    seed of a microbatch = mix(seed of the run, data rank, number of the batch, number of the microbatch)

Its numbers depend on the seed and on how batches are split, but not on what ran before. A run that is resumed, or a
forward that is repeated, draws the same numbers again.

Within a step every stage runs the code between the layers, which may draw too: the noise of a diffusion model is needed
before the first layer and again in the loss. All stages must draw the same there. So a layer leaves torch's generators
as if it had drawn one number, whatever it draws, and also on the stages where it is absent: see :func:`draw_seed`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def mix(*parts: int) -> int:
    """A seed of 63 bits from integers (run, stage, batch, microbatch, ...). It differs if any of them does."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_seed() -> int:
    """The seed for the generators after a layer, drawn before the layer runs or is found absent.

    It is drawn from the generator itself. So a recomputation of several layers (activation checkpointing), which starts
    from the same state, draws the same.
    """
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())  # a script may have another default


class TorchGenerators:
    """torch's default generators of the CPU and of one device (a CPU or a CUDA device)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[torch.Generator] = []

    def seed(self, seed: int) -> None:
        """Seed both generators."""
        for generator in self._made or self._find():
            generator.manual_seed(seed)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards the generators are as they were before."""
        generators = self._find()
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """:meth:`kept`, and seeded inside."""
        with self.kept():
            self.seed(seed)
            yield

    def _find(self) -> list[torch.Generator]:
        if self._device.type == "cuda":
            torch.cuda.init()  # creates the default generators
            self._made = [torch.default_generator, torch.cuda.default_generators[self._device.index or 0]]
        else:
            self._made = [torch.default_generator]
        return self._made


def host_generators_now() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators."""
    return random.getstate(), np.random.get_state(legacy=False)


@contextmanager
def host_generators_kept() -> Iterator[None]:
    """Afterwards Python's and NumPy's generators are as they were before. It takes a tenth of a millisecond: use it
    once a batch, not once a microbatch."""
    before = host_generators_now()
    try:
        yield
    finally:
        _set_host_generators(before)


@contextmanager
def host_generators_from(state: tuple[Any, Any]) -> Iterator[None]:
    """:func:`host_generators_kept`, and inside they go on from a state of :func:`host_generators_now`."""
    with host_generators_kept():
        _set_host_generators(state)
        yield


def _set_host_generators(state: tuple[Any, Any]) -> None:
    python, legacy = state
    random.setstate(python)
    np.random.set_state(legacy)


def host_generators_state() -> Any:
    """A key for the states of Python's and NumPy's generators: equal as long as nobody has drawn from them."""
    legacy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), legacy["pos"], legacy["key"].tobytes()


def seed_host_generators(seed: int) -> None:
    """Seed Python's and NumPy's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
