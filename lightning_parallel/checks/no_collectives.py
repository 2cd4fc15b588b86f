"""Finds collectives over all ranks that a step of an optimizer calls, in a trial in which ranks don't meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_parallel.private.torch.groups import default_group


class CollectiveError(Exception):
    """What has been tried calls a collective."""


class _RefusingGroup(dist.ProcessGroup):
    """All ranks, of which none can be met."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())  # type: ignore[call-arg]
        self.__dict__["__called"] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in ("rank", "size", "getRank", "getSize") and not name.startswith("__"):
            self.__dict__["__called"].append(name)  # torch may replace the error by another one
            raise CollectiveError(name)
        return super().__getattribute__(name)


@contextmanager
def no_collectives() -> Iterator[None]:
    """Inside, torch.distributed's collectives over all ranks fail, also if the code has imported them by name. Those
    over other groups, such as DTensors', go on.

    Raises:
        CollectiveError: at the end, one was called.
    """
    if not dist.is_initialized():
        yield
        return
    group = _RefusingGroup()
    try:
        with default_group(group):
            yield
    finally:
        if called := vars(group)["__called"]:
            raise CollectiveError(f"it calls '{called[0]}' of torch.distributed over all ranks")
