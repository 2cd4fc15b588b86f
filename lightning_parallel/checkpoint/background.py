"""Saves that run in a thread while training goes on.

The step waits until its tensors have been copied to host memory. What a save exchanges goes over a group of its own::

    training   ... 6 | copy | 7   8   9 ...             14 | copy | ...
    thread                  | write ... | rename           or the error of the one before, on all ranks
    removal of older ones   |           | now
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_parallel.private.lightning.replaced import replaced
from lightning_parallel.private.torch.groups import ThreadApart
from lightning_parallel.ranks.collectives import Group


class BackgroundSave:
    """Saves in the background, one at a time. ``group`` are the ranks that save, over gloo, used for nothing else; None
    for a single process."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._path: Path | None = None  # of the newest save
        self._thread: threading.Thread | None = None
        self._saved: Future[None] | None = None  # of the save under way; None: none is

    def start(self, path: str, save: Callable[[Group], None]) -> None:
        """Run ``save(group)`` in a thread, after :meth:`finish`. It is called on all ranks, and fails on all or on
        none."""
        self._path = Path(path)
        self._saved = saved = Future[None]()

        def run() -> None:
            try:
                save(self._group)
            except Exception as error:  # of any kind: it is raised where the run can be ended
                failed = RuntimeError(f"The checkpoint {path} could not be saved in the background: {error}")
                failed.__cause__ = error
                saved.set_exception(failed)
            else:
                saved.set_result(None)

        self._thread = ThreadApart(target=run, name=f"save {path}")
        self._thread.start()

    def take_names(self, callbacks: Iterable[Callback]) -> Callable[[], None]:
        """Have each ModelCheckpoint take the newest save's path for an existing file when it chooses a name. The save
        appears there only when it is whole. Returns a function that ends this.

        Raises:
            ValueError: one would link to the save before it is whole.
        """
        savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        if any(saver.save_last == "link" for saver in savers):
            raise ValueError(
                "ModelCheckpoint(save_last='link') would link to a checkpoint that async_save=True is still writing: "
                "use save_last=True."
            )
        end = ExitStack()
        for saver in savers:

            def is_taken(filepath: Any, trainer: Any, exists: Callable[..., bool] = saver.file_exists) -> bool:
                return exists(filepath, trainer) or Path(filepath) == self._path

            end.callback(replaced(saver, "file_exists", is_taken))
        return end.close

    def after(self, action: Callable[[], None]) -> None:
        """Run ``action`` when the save under way has succeeded; now if none is under way."""

        def act(saved: Future[None]) -> None:
            try:
                if saved.exception() is None:
                    action()
            except OSError as error:
                rank_zero_warn(f"An older checkpoint could not be removed: {error}")

        if self._saved is None:
            action()
        else:
            self._saved.add_done_callback(act)

    def finish(self) -> None:
        """Wait for the save under way, and for the actions after it.

        Raises:
            RuntimeError: it has failed.
        """
        if self._thread is not None:
            self._thread.join()  # which ends after the actions
        saved, self._thread, self._saved = self._saved, None, None
        if saved is not None:
            saved.result()
