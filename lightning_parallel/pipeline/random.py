"""Random numbers of the model, apart from those of the data.

Every stage loads the same batches, so the global generators, which samplers and augmentations draw from, have to stay
equal on all stages; dropout masks, drawn on one stage only, must not move them. So a microbatch's forward runs with
generators of its own, seeded from what it is: its results depend on the layout and the seed, and on nothing that ran
before. A run that is resumed, or a forward that is repeated, draws the same numbers again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def mix(*parts: int) -> int:
    """A seed from integers (run, stage, batch, microbatch, ...): different for any difference, 63 bits."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators of the CPU and of ``device``, seeded inside, as they were outside."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
