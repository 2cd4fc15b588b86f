"""A DataLoader that goes on in the middle of an epoch: a resumed run sees the batches that the stopped one hadn't seen.

Lightning saves the state of loaders that have one, but torch's has none, so a run that is resumed from the middle of an
epoch trains the epoch's first batches again::

    - DataLoader(dataset, batch_size=32, shuffle=True)
    + ResumableDataLoader(dataset, batch_size=32, shuffle=True)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel.private.torch.tensors import tree_leaves


class ResumableDataLoader(DataLoader):
    """A DataLoader whose place in the epoch is saved in checkpoints, and found again. Samples before it aren't loaded.

    The order of an epoch follows from one number, which is drawn from torch's default generator when the epoch begins,
    unless the sampler has a generator of its own. A sampler that isn't torch's has to take its numbers from an
    attribute ``generator``, or from ``set_epoch``. Random augmentations are the same again where they are drawn in this
    process; worker processes begin anew.

    Args:
        dataset: a dataset with a length, read by index.
        *args: passed on to torch's DataLoader.
        **kwargs: passed on to torch's DataLoader.

    Raises:
        ValueError: the place in the data can't be found again: the dataset is an iterable, or the sampler has no
            length.
    """

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{type(dataset).__name__} is an iterable dataset, in which a place can't be found by its number: give "
                f"your loader state_dict() and load_state_dict() of its own."
            )
        try:
            len(self)
        except TypeError as error:
            raise ValueError(
                "The sampler has no length (__len__), so Lightning fetches a batch ahead of the one that runs, and the "
                "place isn't known: give it one."
            ) from error
        sampler = getattr(self.batch_sampler, "sampler", self.sampler)
        given = getattr(sampler, "generator", None)
        self._order = given or torch.Generator()
        self._is_seeded_here = given is None
        if given is None and hasattr(sampler, "generator"):
            sampler.generator = self._order
        self._place = 0  # batches of this epoch that have been handed out
        self._began = self._order.get_state()
        self._next: str | None = None  # what the next iteration gives; None: another epoch
        # It has given all batches of its epoch, and been asked for one more; Lightning may go on with longer ones.
        self.has_ended = False

    def __iter__(self) -> Any:
        comes, self._next, self.has_ended = self._next, None, False
        if comes == "nothing":
            return self._counted(lambda: iter(()))
        if comes == "the rest":
            self._order.set_state(self._began)
            return self._counted(super().__iter__ if self._place == 0 else self._rest)
        if self._is_seeded_here:
            self._order.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        self._place, self._began = 0, self._order.get_state()
        return self._counted(super().__iter__)

    def _counted(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        # Not before the first batch is asked for: workers load ahead, and samplers are told the epoch later.
        with torch.random.fork_rng(devices=[]):  # torch draws the workers' seeds, also where it wouldn't have
            batches = begin()
        for batch in batches:
            self._place += 1
            yield batch
        self.has_ended = True

    def _rest(self) -> Iterator[Any]:
        """The batches of the epoch that are left."""
        rest, name = copy.copy(self), "sampler" if self.batch_sampler is None else "batch_sampler"
        left = islice(getattr(self, name), self._place, None)
        # A DataLoader refuses both changes. Workers that it keeps have begun with its own sampler.
        object.__setattr__(rest, name, left)
        object.__setattr__(rest, "persistent_workers", False)
        return DataLoader.__iter__(rest)

    def state_dict(self) -> dict[str, Any]:
        """The loader's place in its epoch."""
        return {"place": self._place, "order": self._began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next epoch the rest of the one in which ``state`` was saved, if it was saved inside an epoch. With
        several loaders :class:`.ExactResume` decides which one goes on, and has noted it here."""
        self._place, self._began = state["place"], state["order"]
        self._next = state.get("next", "the rest" if self._place < len(self) else None)


def with_what_comes_next(trainer: pl.Trainer, states: Sequence[Any]) -> list[Any]:
    """The states of loaders (Lightning has collected those of loaders that have one), with what comes next.

    After a save inside a batch, before its update, the resumed run begins with this batch, so loaders give it once
    more. A loader that has ended before longer ones gives nothing more in this epoch. Where a shorter loader ends the
    epoch, the rest of a longer one is left out.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    inside = progress["current"]["ready"] - progress["current"]["processed"]
    over = progress["is_last_batch"] and not inside
    loaders = [loader for loader in tree_leaves(trainer.train_dataloader) if hasattr(loader, "load_state_dict")]
    changed = []
    for loader, state in zip(loaders, states, strict=True):
        if isinstance(loader, ResumableDataLoader):
            place = state["place"] - (0 if loader.has_ended else inside)
            comes = "another epoch" if over else "nothing" if place == len(loader) else "the rest"
            state = {**state, "place": place, "next": comes}
        changed.append(state)
    return changed
