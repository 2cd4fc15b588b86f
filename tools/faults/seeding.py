"""Puts a fault into the library, or into a module, on the ranks of a layout only: one process stays as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning_parallel.comparison import check

Seeded = Callable[[], AbstractContextManager[Any]]  # the fault is there inside

_ALONE = "FAULTS_ALONE"  # in the environment, while one process trains


@contextmanager
def layouts_only() -> Iterator[None]:
    """Inside, ``check`` tells which of its trainings are under a layout. What a step asks torch.distributed doesn't:
    it sees replicas only."""
    module: Any = check
    original = module.train_in_one_process

    def alone(*args: Any, **kwargs: Any) -> Any:
        os.environ[_ALONE] = "1"
        try:
            return original(*args, **kwargs)
        finally:
            del os.environ[_ALONE]

    module.train_in_one_process = alone
    try:
        yield
    finally:
        module.train_in_one_process = original


def is_seeded(rank: int | None = None) -> bool:
    """Is this one of a layout's ranks, or this rank of them?"""
    return _ALONE not in os.environ and rank in (None, int(os.environ["RANK"]))


@contextmanager
def replaced(owner: Any, name: str, by: Callable[..., Any], rank: int | None = None) -> Iterator[None]:
    """Inside, ``by(original, ...)`` is called in the place of a function or a method.

    Args:
        owner: its module or its class.
        rank: where; None for all ranks of a layout.
    """
    original = vars(owner)[name]

    def function(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs) if is_seeded(rank) else original(*args, **kwargs)

    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def in_place_of(owner: Any, name: str, rank: int | None = None) -> Callable[[Callable[..., Any]], Seeded]:
    """Makes a fault of a function, which :func:`replaced` then calls in the place of another one."""
    return lambda by: lambda: replaced(owner, name, by, rank)
