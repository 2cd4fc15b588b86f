"""Dropout under tensor parallelism: different masks inside the sharded region, equal ones outside.

Outside, all ranks of a tensor group compute the same, so they must draw the same: dropout between blocks, the noise of
a loss, and what samplers draw from the global generator. Between a column layer and its row layer each rank has values
of its own; equal masks there would be one mask, repeated over the heads. Megatron-LM (2019, appendix B.2) draws them
from a second generator. Here the one generator is reseeded inside and put back after, so that whatever draws from it
does right, and so does activation checkpointing, which restores it and no other.

Whether a generator is inside is told by its own seed, by nothing else: a recomputation may begin inside, end inside, or
be broken off there (``use_reentrant=False`` stops it once it has all that backward needs).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class ShardedRegion:
    """The region between column and row layers, as the device's global generator sees it.

    A region is entered and left many times in a step, once for each pair of layers.

    Args:
        index: of this rank on the tensor axis.
        device: of the model: a CPU or a CUDA device.
    """

    def __init__(self, index: int, device: torch.device) -> None:
        self._index = index
        self._device = device
        # What the generator goes on from after leaving, by its seed inside; 5 KB each on a CPU, 16 bytes on a GPU.
        self._outside: dict[int, Tensor] = {}

    def enter(self) -> None:
        """Reseed with the generator's state and this rank's index. Nothing happens inside."""
        generator = self._generator()
        if generator.initial_seed() in self._outside:
            return
        state = generator.get_state()
        number = hashlib.blake2b(state.numpy().tobytes(), salt=self._index.to_bytes(8, "little"), digest_size=8)
        seed = int.from_bytes(number.digest(), "little") >> 1
        self._outside[seed] = state
        generator.manual_seed(seed)

    def leave(self) -> None:
        """Go on as outside, one number further if any were drawn inside: so the next region draws others, and a model
        without dropout leaves the generator, which data are shuffled by, as a single process would. Nothing happens
        outside."""
        generator = self._generator()
        seed = generator.initial_seed()
        if seed not in self._outside:
            return
        drawn = not torch.equal(generator.get_state(), generator.manual_seed(seed).get_state())
        generator.set_state(self._outside[seed])
        if drawn:
            torch.empty((), device=self._device).random_()  # not read, or a GPU would wait for it

    def close(self) -> None:
        """At the end of a step, after its backward: leave, and forget what only a recomputation could ask for."""
        self.leave()
        self._outside.clear()

    def _generator(self) -> torch.Generator:
        if self._device.type != "cuda":
            return torch.default_generator
        torch.cuda.init()  # the generators exist from then on
        index = self._device.index
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
