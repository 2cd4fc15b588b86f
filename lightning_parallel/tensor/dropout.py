"""Dropout under tensor parallelism: different masks inside a sharded region, equal ones outside.

Outside, all ranks of a tensor group compute the same values, so they must draw the same random numbers: for dropout
between blocks, for the noise of a loss, and for samplers that use the global generator. Between a column layer and its
row layer, each rank has its own features or heads. With equal masks there, every rank's heads would share one mask::

    dropout        column   dropout        row   dropout
    equal masks  |        different masks      | equal masks

Megatron-LM (2019, appendix B.2) draws the masks inside from a second generator. Here the one generator is reseeded
inside and put back afterwards. So whatever draws from it draws the right numbers, and activation checkpointing works,
which restores this generator and no other.

A generator's own seed tells whether it is inside, and nothing else does: a recomputation may begin inside, end inside,
or be broken off there (``use_reentrant=False`` stops as soon as it has all that the backward needs).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lightning_parallel.seeding import Generators


class ShardedRegion:
    """The region between column and row layers, as the device's global generator sees it. It is entered and left once
    for each pair of layers. ``index`` is this rank's coordinate on the tensor axis."""

    def __init__(self, index: int, device: torch.device) -> None:
        self._index = index
        self._device = device
        self._generators = Generators(device)
        # The generator's state outside, by its seed inside. 5 KB each on a CPU, 16 bytes on a GPU.
        self._outside: dict[int, Tensor] = {}

    def enter(self) -> None:
        """Reseed with the generator's state and this rank's index. Inside the region this does nothing."""
        generator = self._generators.of_torch[-1]
        if generator.initial_seed() in self._outside:
            return
        state = generator.get_state()
        number = hashlib.blake2b(state.numpy().tobytes(), salt=self._index.to_bytes(8, "little"), digest_size=8)
        seed = int.from_bytes(number.digest(), "little") >> 1
        self._outside[seed] = state
        generator.manual_seed(seed)

    def leave(self) -> None:
        """Restore the generator's state from before :meth:`enter`, one number further if any were drawn inside, so the
        next region draws other numbers. Outside the region this does nothing."""
        generator = self._generators.of_torch[-1]
        seed = generator.initial_seed()
        if seed not in self._outside:
            return
        drawn = not torch.equal(generator.get_state(), generator.manual_seed(seed).get_state())
        generator.set_state(self._outside[seed])
        if drawn:
            torch.empty((), device=self._device).random_()  # not read, or a GPU would have to be waited for

    def close(self) -> None:
        """End a step, after its backward: leave the region, and forget what only a recomputation could need."""
        self.leave()
        self._outside.clear()
