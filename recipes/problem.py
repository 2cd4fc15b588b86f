"""What is wrong with a config, and how the user is told. Nothing here imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hydra.errors import CompactHydraException

NOT_KNOWN = "OUTPUT_DIR"  # the folder of a run, where Hydra has yet to choose it


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a config.

    Attributes:
        path: of the value, such as ``strategy.stages``.
        value: that it has.
        message: what is wrong with it.
        fix: what to do.
    """

    path: str
    value: Any
    message: str
    fix: str

    def __str__(self) -> str:
        value = "null" if self.value is None else str(self.value)
        return f"{self.path}={value}: {self.message}; {self.fix}"


class ConfigError(CompactHydraException):
    """A config that can't be run. Hydra prints its message without a stack trace."""

    def __init__(self, problems: Iterable[Problem | str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{count} problem{'s' * (count != 1)} in the config, nothing was started:{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Launchers of Hydra's that run jobs in other processes send the error back.
        return ConfigError, (self.problems,)


def closest(wrong: str, known: Iterable[str]) -> str:
    """``did you mean ...? known: ...``, for an error message."""
    known = sorted(known)
    match = difflib.get_close_matches(wrong, known, n=1)
    return (f"did you mean {match[0]}? " if match else "") + f"known: {', '.join(known)}"
