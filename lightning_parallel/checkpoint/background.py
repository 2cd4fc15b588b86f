"""Saves that run in a thread while training goes on.

The step waits until its tensors have been copied to host memory. What a save exchanges goes over a group of its own::

    training   ... 6 | copy | 7   8   9 ...             14 | copy | ...
    thread                  | write ... | rename           or the error of the one before, on all ranks
    removal of older ones   |           | now
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.private.torch import ThreadApart
from lightning_parallel.ranks.collectives import Group


class BackgroundSave:
    """Saves in the background, one at a time. ``group`` are the ranks that save, over gloo, used for nothing else; None
    for a single process."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._after: list[Callable[[], None]] | None = None  # what waits for the save under way; None: none is
        self._lock = threading.Lock()  # for what follows a save

    def start(self, path: str, save: Callable[[Group], None]) -> None:
        """Run ``save(group)`` in a thread when the previous save has ended. It is called on all ranks, and fails on all
        or on none. ``path`` is for errors.

        Raises:
            RuntimeError: the one before has failed.
        """
        self.finish()
        self._after = []
        self._thread = ThreadApart(target=self._run, args=(path, save), name=f"save {path}")
        self._thread.start()

    def after(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the save under way has succeeded; now if none is under way."""
        with self._lock:
            if self._after is not None:
                self._after.append(action)
                return
        action()

    def finish(self) -> None:
        """Wait for the save under way, and for the actions after it.

        Raises:
            RuntimeError: it has failed.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = self._after = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, path: str, save: Callable[[Group], None]) -> None:
        try:
            save(self._group)
        except Exception as error:  # of any kind: it is raised where the run can be ended
            self._error = RuntimeError(f"The checkpoint {path} could not be saved in the background: {error}")
            self._error.__cause__ = error
            return
        with self._lock:
            actions, self._after = self._after or (), None
        for action in actions:
            try:
                action()
            except OSError as error:
                rank_zero_warn(f"An older checkpoint could not be removed: {error}")
