"""Puts functions in the place of objects' methods, and the methods back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


class Instead:
    """A function in the place of an object's method. ``before`` is what stood in the instance's dictionary: another
    function, or None for the method of its class."""

    def __init__(self, function: Callable[..., Any], method: Callable[..., Any], before: Any) -> None:
        self._function, self.before = function, before
        # By this name Lightning sees whether the user has overridden a hook, and which arguments it takes.
        self.__wrapped__ = inspect.unwrap(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Put a function in the place of an object's method. Returns a function that puts back what was there."""
    mine = Instead(function, getattr(owner, name), vars(owner).get(name))
    setattr(owner, name, mine)
    return partial(end_replacement, owner, name, mine)


def end_replacement(owner: Any, name: str, mine: Instead) -> None:
    """End one replacement, unless it has ended. Replacements made after it stay."""
    above, found = None, vars(owner).get(name)
    while isinstance(found, Instead) and found is not mine:
        above, found = found, found.before
    if found is not mine:
        return
    if above is not None:
        above.before = mine.before
    elif mine.before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, mine.before)
