"""Random numbers of the model, kept apart from those of the data.

Every stage loads the same batches, so the global generators, from which samplers and augmentations draw, must stay
equal on all stages. Dropout masks are drawn on one stage only, so they must not move these generators. Therefore each
microbatch's forward runs with generators of its own, seeded from what the microbatch is::

    seed of a microbatch = mix(seed of the run, data rank, number of the batch, number of the microbatch)

Its numbers depend on the seed and on how batches are split, but not on what ran before. A run that is resumed, or a
forward that is repeated, draws the same numbers again.

Within a step every stage runs the code between the layers, which may draw too: the noise of a diffusion model is needed
before the first layer and again in the loss. All stages must draw the same there. So torch's generators get a new seed
after each layer, whatever it draws, and also on the stages where it is absent: see :func:`next_seed`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


def mix(*parts: int | str) -> int:
    """A seed of 63 bits from numbers and names (run, stage, batch, layer, ...). It differs if any of them does."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def next_seed(layer: str) -> int:
    """The seed for the generators after a layer. Call it before the layer draws.

    It follows from the seed that torch's generator of the CPU was given last. That seed is a part of the generator's
    state, so a recomputation of several layers (activation checkpointing), which starts from the same state, draws the
    same. It follows from the layer's name, too: a layer that calls another one isn't followed by the inner one's seed.
    """
    return mix(torch.initial_seed(), layer)


class TorchGenerators:
    """torch's default generators of the CPU and of one device (a CPU or a CUDA device)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seed(self, seed: int) -> None:
        """Seed both generators."""
        for generator in self._generators:
            generator.manual_seed(seed)

    def kept(self) -> AbstractContextManager[None]:
        """Afterwards the generators are as they were before."""
        return torch.random.fork_rng([self._device.index or 0] if self._device.type == "cuda" else [])

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """:meth:`kept`, and seeded inside."""
        with self.kept():
            self.seed(seed)
            yield

    @cached_property
    def _generators(self) -> list[torch.Generator]:
        if self._device.type != "cuda":
            return [torch.default_generator]
        torch.cuda.init()  # creates the default generators
        return [torch.default_generator, torch.cuda.default_generators[self._device.index or 0]]


def host_generators_now() -> tuple[Any, Any]:
    """The states of Python's and NumPy's generators."""
    return random.getstate(), np.random.get_state(legacy=False)


@contextmanager
def host_generators_kept(begin: tuple[Any, Any] | None = None) -> Iterator[None]:
    """Afterwards Python's and NumPy's generators are as they were before. Inside they go on from ``begin``, states of
    :func:`host_generators_now`, if it is given. It takes a tenth of a millisecond: use it once a batch, not once a
    microbatch."""
    python, legacy = host_generators_now()
    try:
        if begin is not None:
            random.setstate(begin[0])
            np.random.set_state(begin[1])
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def seed_host_generators(seed: int) -> None:
    """Seed Python's and NumPy's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


# -- in checkpoints ----------------------------------------------------------------------------------------------


def random_state() -> dict[str, Tensor]:
    """The states of torch's, Python's and NumPy's generators as tensors, by name."""
    (version, words, gauss), legacy = host_generators_now()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor(legacy["state"]["pos"]),
    }
    # Both draw normal numbers in pairs, and keep the second one for the next call.
    if gauss is not None:
        state["python_gauss"] = torch.tensor(gauss, dtype=torch.float64)
    if legacy["has_gauss"]:
        state["numpy_gauss"] = torch.tensor(legacy["gauss"], dtype=torch.float64)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Set the generators to what :func:`random_state` returned. What the state lacks stays as it is."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, *words = state["python"].tolist()
        gauss = float(state["python_gauss"]) if "python_gauss" in state else None
        random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        key = state["numpy"].numpy().astype(np.uint32)
        kept = float(state["numpy_gauss"]) if "numpy_gauss" in state else 0.0
        np.random.set_state(("MT19937", key, int(state["numpy_position"]), int("numpy_gauss" in state), kept))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """The kinds of the generators that have drawn between two random states."""
    same = {name for name in before.keys() & after.keys() if torch.equal(before[name], after[name])}
    return {_kind_of(name) for name in (before.keys() | after.keys()) - same}


def states_of(state: Mapping[str, Tensor], kinds: Collection[str]) -> dict[str, Tensor]:
    """The part of a random state that belongs to generators of these kinds."""
    return {name: value for name, value in state.items() if _kind_of(name) in kinds}


def _kind_of(name: str) -> str:
    """The generator that an entry of a random state belongs to: "torch", "python", "numpy" or "cuda"."""
    return name.split("_")[0]
