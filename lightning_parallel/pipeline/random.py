"""Random numbers of the model, apart from those of the data.

Every stage loads the same batches, so the global generators, which samplers and augmentations draw from, have to stay
equal on all stages; dropout masks, drawn on one stage only, must not move them. So a microbatch's forward runs with
generators of its own, seeded from what it is: its results depend on the seed and on how batches are split, and on
nothing that ran before. A run that is resumed, or a forward that is repeated, draws the same numbers again.

Within a step every stage runs the code between the layers, which may draw too (the noise of a diffusion model, needed
before the first layer and again in the loss): all stages must draw the same there. So a layer leaves torch's generators
as if it had drawn one number, whatever it draws, and on the stages where it is absent too: see
:func:`draw_seed`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mix(*parts: int) -> int:
    """A seed from integers (run, stage, batch, microbatch, ...): different for any difference, 63 bits."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Torch's generators of the CPU and of ``device``: afterwards as they were."""
    generators = _generators(device)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """:func:`kept`, and seeded inside."""
    with kept(device):
        reseed(seed, device)
        yield


def draw_seed() -> int:
    """Before a layer runs, or is found absent: with what to :func:`reseed` after it. Drawn from the generator itself,
    so that a recomputation of several layers (activation checkpointing), which starts from the same state, draws the
    same."""
    return int(torch.empty((), dtype=torch.int64).random_())


def reseed(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of ``device``."""
    for generator in _generators(device):
        generator.manual_seed(seed)


def _generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cuda":
        return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]
    return [torch.default_generator]


@contextmanager
def host_generators_kept() -> Iterator[None]:
    """Python's and NumPy's generators: afterwards as they were. A tenth of a millisecond, so once a batch."""
    python, legacy = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def seed_host_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
