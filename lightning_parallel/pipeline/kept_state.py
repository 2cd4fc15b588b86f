"""What a step writes to its modules beside parameters, undone: a counter, lists of outputs, a meter, a metric's state.

For a step that is only looked at (``flow.py``): it doesn't count, and its values are absent.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from lightning_parallel.pipeline.absent import AbsentTensor

_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_parallel", "transformers", *sys.stdlib_module_names}
_MANY = 10_000  # items; those of a longer container are put back, but not looked into


class StateKept:
    """A context that leaves as they were: attributes of ``module`` and of its parts, real tensors there, and lists,
    dictionaries, sets and objects of the user's own in which they are found, to any depth.

    Args:
        module: all its submodules too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._containers: list[tuple[Any, Any]] = []  # with what they held
        self._tensors: list[tuple[Tensor, Tensor]] = []
        # The modules' own, where other stages' parameters are absent whatever a step does.
        self._stores = {id(store) for m in self._modules for store in (m._parameters, m._buffers)}

    def __enter__(self) -> StateKept:
        seen: set[int] = set()
        waiting: list[Any] = [vars(m) for m in self._modules]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if not (value.is_meta or isinstance(value, AbsentTensor)):
                    self._tensors.append((value, value.detach().clone()))
            elif (held := _contents(value)) is not None:
                if not isinstance(value, tuple):
                    self._containers.append((value, held))
                if len(held) <= _MANY:
                    waiting.extend(held.values() if isinstance(held, dict) else held)
        return self

    def written(self) -> Iterator[AbsentTensor]:
        """Absent tensors that have been left in lists, dictionaries and attributes so far."""
        for container, _ in self._containers:
            if id(container) in self._stores:
                continue
            held = _contents(container) or ()
            values: Iterable[Any] = held.values() if isinstance(held, dict) else held
            yield from (value for value in values if isinstance(value, AbsentTensor))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for container, held in self._containers:
            now = container if isinstance(container, dict | list | set | deque) else vars(container)
            now.clear()
            now.extend(held) if isinstance(now, list | deque) else now.update(held)
        for tensor, content in self._tensors:
            if not tensor.equal(content):
                tensor.data.copy_(content)


def _contents(value: Any) -> dict[Any, Any] | list[Any] | None:
    """A copy of what a container or an object of the user's holds; None: it is none."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple | set | deque):
        return list(value)
    if isinstance(value, nn.Module | type) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    return dict(vars(value)) if hasattr(value, "__dict__") else None
