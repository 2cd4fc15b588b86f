"""Saves that run in a thread while training goes on.

The step waits until its tensors have been copied to host memory. What a save exchanges goes over a group of its own::

    training   ... 6 | copy | 7   8   9 ...            ... 14 | error
    thread                  | write ... | rename            agree: before batch 14
    removal of older ones   |           | now

A failed save ends the run on all ranks before the same batch. The threads, which all know of the failure, agree on the
first batch that none has begun; while they do, nobody begins one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.private.torch import ThreadApart
from lightning_parallel.ranks.collectives import Group, PeerLostError, highest


class BackgroundSave:
    """Saves in the background, one at a time. ``group`` are the ranks that save, over gloo, used for nothing else; None
    for a single process."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._after: list[Callable[[], None]] | None = None  # what waits for the save under way; None: none is
        self._gate = threading.Lock()  # for what follows a save; closed while the threads agree
        self._batch = 0  # that this rank has begun
        self._stop = 0  # the batch before which a failure ends the run

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
        with self._gate:
            if self._after is not None:
                self._after.append(action)
                return
        action()

    def begin_batch(self) -> bool:
        """Begin a batch. True if all ranks end before it, since a save has failed."""
        with self._gate:
            self._batch += 1
            return self._error is not None and self._batch >= self._stop

    def finish(self) -> None:
        """Wait for the save under way, and for the actions after it.

        Raises:
            RuntimeError: it has failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, path: str, save: Callable[[Group], None]) -> None:
        try:
            save(self._group)
        except Exception as error:  # of any kind: it is raised where the run can be ended
            failure = RuntimeError(f"The checkpoint {path} could not be saved in the background: {error}")
            failure.__cause__ = error
            with self._gate:
                self._stop, self._error, self._after = self._agreed(), failure, None
            return
        with self._gate:
            actions, self._after = self._after or (), None
        for action in actions:
            try:
                action()
            except OSError as error:
                rank_zero_warn(f"An older checkpoint could not be removed: {error}")

    def _agreed(self) -> int:
        """The first batch that no rank has begun."""
        batch = self._batch + 1
        if self._group is None:
            return batch
        try:
            return highest(self._group, batch)[0]
        except PeerLostError:
            return 0
