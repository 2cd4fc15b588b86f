"""The user's own random generators, besides the default ones of torch, NumPy and Python."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Python's and NumPy's default generators: their methods are functions of the modules. All stages seed them.
ON_HOST = tuple(map(attrgetter("__self__"), (np.random.random, random.random)))
LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_parallel", *sys.stdlib_module_names})


def is_own_generator(value: Any) -> bool:
    """Is an object a generator with a state, other than the default ones?"""
    if not isinstance(value, _TYPES) or isinstance(value, random.SystemRandom):
        return False
    return all(value is not each for each in (torch.default_generator, *ON_HOST))


def state_of(generator: Any) -> Any:
    """A generator's state, for :func:`set_state`."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state of :func:`state_of`."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def globals_beside(parts: Iterable[nn.Module]) -> Iterator[Any]:
    """The generators among the global variables of the files in which the modules' classes are defined."""
    files = {type(part).__module__ for part in parts}
    for name in files:
        if name.partition(".")[0] not in LIBRARIES and name in sys.modules:
            yield from (value for value in vars(sys.modules[name]).values() if is_own_generator(value))


class GeneratorsWatched:
    """Tells whether some generators are drawn from."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._generators, self._before = generators, [*map(_seen, generators)]

    def drawn(self) -> bool:
        """Has one of them been drawn from since this object was made?"""
        return self._before != [*map(_seen, self._generators)]


def _seen(generator: Any) -> bytes:
    state = state_of(generator)
    return bytes(state.numpy()) if isinstance(state, torch.Tensor) else pickle.dumps(state)
