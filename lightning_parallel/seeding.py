"""Random numbers of the model, kept apart from those of the data.

Every stage loads the same batches, so the global generators, from which samplers and augmentations draw, must stay
equal on all stages. Dropout masks are drawn on one stage only, so they must not move these generators. Therefore each
microbatch's forward runs with generators of its own, seeded from what the microbatch is::

    seed of a microbatch = mix(seed of the run, data rank, number of the batch, number of the microbatch)

Its numbers depend on the seed and on how batches are split, but not on what ran before. A run that is resumed, or a
forward that is repeated, draws the same numbers again.

Within a step every stage runs the code between the layers, which may draw too: the noise of a diffusion model is needed
before the first layer and again in the loss. All stages must draw the same there. So torch's generators get a new seed
after each layer, whatever it draws, and also on the stages where it is absent::

    seed after a layer = mix(torch.initial_seed() before the layer draws, name of the layer)

``torch.initial_seed()`` is the seed that torch's generator of the CPU was given last. It is a part of the generator's
state. A recomputation of several layers (activation checkpointing) starts from the same state, so it draws the same.
The name is mixed in because a layer may call another one: its seed then differs from the inner one's.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


def mix(*parts: int | str) -> int:
    """A seed of 63 bits from numbers and names (run, stage, batch, layer, ...). It differs if any of them does."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Generators:
    """The global generators: torch's of the CPU and of one device (a CPU or a CUDA device), Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seed(self, seed: int, *, host: bool = True) -> None:
        """Seed the generators. With ``host=False`` seed torch's only, not Python's and NumPy's."""
        for generator in self.of_torch:
            generator.manual_seed(seed)
        if host:
            random.seed(seed)
            np.random.seed(seed % 2**32)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards the generators are as they were before. It takes a tenth of a millisecond: use it once a batch,
        not once a microbatch."""
        python, legacy = random.getstate(), np.random.get_state(legacy=False)
        try:
            with torch.random.fork_rng([self._device.index or 0] if self._device.type == "cuda" else []):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """:meth:`kept`, and seeded inside."""
        with self.kept():
            self.seed(seed)
            yield

    @cached_property
    def of_torch(self) -> list[torch.Generator]:
        """torch's of the CPU, and that of a GPU."""
        if self._device.type != "cuda":
            return [torch.default_generator]
        torch.cuda.init()  # creates the default generators
        return [torch.default_generator, torch.cuda.default_generators[self._device.index or 0]]


# -- in checkpoints ----------------------------------------------------------------------------------------------


def random_state() -> dict[str, Tensor]:
    """The states of torch's, Python's and NumPy's generators as tensors, by name. Those of the latter two are texts in
    JSON."""
    python, legacy = random.getstate(), np.random.get_state(legacy=False)
    texts = {"python": json.dumps(python), "numpy": json.dumps(legacy, default=np.ndarray.tolist)}
    state = {name: torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8) for name, text in texts.items()}
    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Set the generators to what :func:`random_state` returned. What the state lacks stays as it is."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, words, gauss = json.loads(state["python"].numpy().tobytes())
        random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        np.random.set_state(json.loads(state["numpy"].numpy().tobytes()))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
