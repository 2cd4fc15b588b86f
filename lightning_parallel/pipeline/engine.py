"""Runs a schedule on a stage.

The schedule says what is computed and when; the messages follow from it. A forward waits for the activation that the
previous chunk sent, a backward for the gradient that the next chunk sent (``chunk.py``). The engine knows no Lightning:
what a microbatch's step is, what an update does and which weights a forward uses are given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, assert_never

import torch
from torch import Tensor

from lightning_parallel.messages.ends import ends_of
from lightning_parallel.pipeline.chunk import Chunk, Completing, Microbatch
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.validation import Validation
from lightning_parallel.pipeline.weights import WeightVersions
from lightning_parallel.ranks.groups import Wires
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Step,
    StepOfChunk,
)
from lightning_parallel.seeding import Generators
from lightning_parallel.timeline.recording import Timeline


class Engine:
    """Runs actions on this rank's chunks.

    Args:
        layout: tells the ranks of the neighbouring stages.
        wires: the wires to the neighbouring stages' ranks.
        loss_of: takes the loss out of what the user's step returned, in the last chunk.
        weights: by chunk, what decides which version of the weights a forward uses; by default the module's own
            parameters.
        halves: run a backward's second half where the schedule has it. Otherwise both halves run together.
        completing: a context around the actions that complete a chunk's gradients for an update; None for none.
    """

    def __init__(
        self,
        stage: Stage,
        layout: Layout,
        wires: Wires,
        device: torch.device,
        *,
        loss_of: Callable[[Any], Tensor],
        weights: Mapping[int, WeightVersions] | None = None,
        timeline: Timeline | None = None,
        halves: bool = True,
        completing: Completing | None = None,
    ) -> None:
        self._timeline = timeline or Timeline(enabled=False)
        self._halves, self._completing = halves, completing
        self._generators = Generators(device)
        self._chunks = {
            index: Chunk(
                index,
                stage,
                ends,
                device,
                generators=self._generators,
                loss_of=loss_of,
                weights=None if weights is None else weights[index],
                timeline=self._timeline,
            )
            for index, ends in ends_of(stage.partition.placement, layout, wires, device).items()
        }

    # -- training ------------------------------------------------------------------------------------------------

    def run(
        self,
        actions: Iterable[Action],
        microbatches: Mapping[int, Microbatch],
        *,
        update: Callable[..., None] | None = None,
        more_follow: bool = False,
    ) -> list[Any]:
        """Run a list of actions, or a slice of an endless one.

        Args:
            microbatches: the microbatches whose forward is among ``actions``, by number.
            update: called at each ``Step``, with the chunk if it is that of one.
            more_follow: another call will run more forwards, or :meth:`end_stream` will tell that none come. The first
                one's activation is received ahead.

        Returns:
            What the user's step returned for each forward of the last chunk, on its stage; an empty list on the others.

        Raises:
            PeerLostError: a neighbouring stage has stopped.
            TakenBack: the update before these microbatches doesn't hold (``validation.py``).
            RuntimeError: what the user's step, ``loss_of`` or a stage that finds layers out of order raises.
        """
        # Without halves the first one does all.
        actions = [action for action in actions if self._halves or not isinstance(action, BackwardWeight)]
        coming: dict[int, list[int]] = {chunk: [] for chunk in self._chunks}  # microbatches, by index
        for action in actions:
            if isinstance(action, Forward):
                coming[action.chunk].append(microbatches[action.microbatch].index)
        for which, indices in coming.items():
            if indices:
                self._chunks[which].begin(indices, more_follow=more_follow)
        outputs: list[Any] = []
        last_chunk = [*self._chunks.values()][-1]
        with self._generators.kept():  # backwards and updates may draw too
            last = _last_before_steps(actions) if self._completing is not None else ()
            for i, action in enumerate(actions):
                if isinstance(action, Step):
                    with self._timeline.span("step", action.update):
                        if update is not None:
                            update(*([action.chunk] if isinstance(action, StepOfChunk) else ()))
                    continue
                chunk, number = self._chunks[action.chunk], action.microbatch
                completing = self._completing if i in last else None
                if isinstance(action, Forward):
                    work = microbatches[number]
                    outputs += chunk.forward(number, work)
                    if work.validation is not None and chunk is last_chunk:
                        self._accept(work.validation)
                elif isinstance(action, BackwardWeight):
                    chunk.second_half(number, completing)
                elif isinstance(action, Backward | BackwardInput):
                    in_halves = self._halves and isinstance(action, BackwardInput)
                    chunk.backward(number, completing, in_halves=in_halves)
                else:
                    assert_never(action)
        if not more_follow:
            self.flush()  # all receives have been posted: no computation is waited for, but copies through the host
        return outputs

    def _accept(self, validation: Validation) -> None:
        validation.accept()
        for chunk in self._chunks.values():
            chunk.accept()

    def drop_batch(self) -> None:
        """Drop what has run of a batch, after a ``TakenBack``. It may then begin anew."""
        self._end([*self._chunks.values()])

    def flush(self) -> None:
        """Wait until every message has arrived. Messages of a process that ends before that are lost."""
        for chunk in self._chunks.values():
            for sender in chunk.senders:
                sender.flush()

    def end_stream(self) -> None:
        """End an endless list after its last backward: tell each next chunk that the batch it expects won't come."""
        if ahead := [chunk for chunk in self._chunks.values() if chunk.is_ahead]:
            self._end(ahead)
            self.flush()

    def _end(self, chunks: Sequence[Chunk]) -> None:
        """End a batch that has begun, or that chunks expect."""
        for chunk in chunks:
            chunk.end()
        for chunk in chunks:  # after all ends: a chunk waits for that of the previous one, which may be on this rank
            chunk.drop()

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, step: Callable[[], Any], number: int = 0) -> Any:
        """Run a forward only. With one chunk a stage, each stage is one batch ahead of the next; with several, a batch
        goes round through the stages.

        Args:
            step: the user's step, bound to a batch.

        Returns:
            What the step returned, on the last stage; None on the others.
        """
        outputs = [chunk.evaluate(step, number) for chunk in self._chunks.values()]
        return outputs[-1]


def _last_before_steps(actions: Sequence[Action]) -> set[int]:
    """The indices of the actions that complete some of a chunk's gradients before a step: its last first half completes
    those that can't wait, its last whole backward or second half all others."""
    found: set[int] = set()
    later: dict[int, set[type[Action]]] = {}  # by chunk: the backwards before its next step, if it has one
    chunks = {action.chunk for action in actions if not isinstance(action, Step)}
    for i, action in reversed([*enumerate(actions)]):
        if isinstance(action, Step):
            later |= {chunk: set() for chunk in ({action.chunk} if isinstance(action, StepOfChunk) else chunks)}
        elif not isinstance(action, Forward) and (backwards := later.get(action.chunk)) is not None:
            if isinstance(action, BackwardInput):
                backwards = backwards - {BackwardWeight}  # they complete other gradients
            if not backwards:
                found.add(i)
            later[action.chunk].add(type(action))
    return found
