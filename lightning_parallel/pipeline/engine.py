"""Runs a schedule on a stage.

The schedule says what is computed and when; the messages follow from it. A forward waits for the activation that the
stage before sent, a backward for the gradient that the stage after sent, and each receive is posted as soon as the
one before has been read, so it is in flight while the stage computes. The engine knows no Lightning: what a
microbatch's step is, what an update does and which weights a forward uses are given to it.

    on stage s, 1F1B:   F(k)                                B(k - w)
                        begin the user's step
                        take activation k      <-- s-1      take gradient k - w          <-- s+1
                        post activation k + 1               post gradient k - w + 1
                        run this stage's layers             run autograd
                        send the output        --> s+1      send the input's gradient    --> s-1

A forward waits within the user's step, at the first absent layer that something arrives of. What comes before, in a
deep model a millisecond of asking absent layers for their shapes, runs while the message is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.layout import Groups, Layout
from lightning_parallel.pipeline.channel import Link, Receiver, Sender
from lightning_parallel.pipeline.crossing import Arrival, Departure
from lightning_parallel.pipeline.message import Format, gradient_format
from lightning_parallel.pipeline.random import kept, reseed
from lightning_parallel.pipeline.schedule import Action, Backward, Forward, Step
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.timeline import Timeline
from lightning_parallel.pipeline.weights import CurrentWeights, Weights


@dataclass(frozen=True)
class Microbatch:
    """One microbatch's work.

    Attributes:
        step: the user's step, bound to this microbatch. Its result on the last stage is given to ``loss_of``.
        weight: factor of its loss in the update (its share of the batch, accumulation, loss scale).
        place: its index within its batch: where in the schedule the formats of its messages are remembered.
        seed: of the random numbers that its forward draws.
    """

    step: Callable[[], Any]
    weight: float
    place: int
    seed: int


@dataclass(frozen=True)
class _InFlight:
    """What a forward leaves for its backward. Edges of the graph, not tensors: an output's memory is free once sent."""

    number: int
    edges: list[GradientEdge]
    seeds: list[Tensor]  # what the backward starts from, on the last stage: the weight of the loss
    gradients: Format  # elsewhere: what the next stage will send
    sent: int  # activation messages sent, this one included
    arrival: Arrival | None
    token: Any


class Engine:
    """Runs actions on this rank's stage.

    Args:
        stage: what runs here.
        layout, groups: where the neighbours are.
        loss_of: takes the loss out of what the user's step returned, on the last stage.
        weights: which weights a forward uses.
        timeline: records what ran when.
        completing: called before a backward that is followed by a step: it completes the gradients.
    """

    def __init__(
        self,
        stage: Stage,
        layout: Layout,
        groups: Groups,
        device: torch.device,
        *,
        loss_of: Callable[[Any], Tensor],
        weights: Weights | None = None,
        timeline: Timeline | None = None,
        completing: Callable[[], None] | None = None,
    ) -> None:
        self._stage = stage
        self._completing = completing
        self._device = device
        self._loss_of = loss_of
        self._weights: Weights = weights or CurrentWeights()
        self._timeline = timeline or Timeline(enabled=False)
        self._in_flight: deque[_InFlight] = deque()
        self._streaming = False  # endless: every stage but the first has posted a receive for a batch yet to come
        self._gradients_taken = 0  # gradient messages, empty ones included

        def link(group: dist.ProcessGroup | None, neighbour: int) -> Link | None:
            if group is None:
                return None
            peer = layout.rank_of(stage=neighbour)
            return Link(group, peer, layout.describe(peer), device)

        before, after = layout.stage - 1, layout.stage + 1
        # The first stage has no stage before it, the last none after it.
        self._activations_in = _maybe(Receiver, link(groups.forward_in, before))
        self._activations_out = _maybe(Sender, link(groups.forward_out, after))
        self._gradients_in = _maybe(Receiver, link(groups.backward_in, after))
        self._gradients_out = _maybe(Sender, link(groups.backward_out, before))

    @property
    def activations_held(self) -> int:
        """Microbatches whose forward has run here and whose backward hasn't."""
        return len(self._in_flight)

    # -- training ------------------------------------------------------------------------------------------------

    def run(
        self,
        actions: Iterable[Action],
        microbatches: Mapping[int, Microbatch],
        *,
        update: Callable[[], None] | None = None,
        endless: bool = False,
    ) -> list[Any]:
        """Run a list of actions, or a slice of an endless one.

        Args:
            actions: what to do, in order.
            microbatches: by number, those whose forward is among ``actions``.
            update: what a ``Step`` does.
            endless: more forwards will come in another call (or :meth:`end_stream`): the first one's activation is
                received ahead.

        Returns:
            What the user's step returned for each forward, on the last stage; an empty list on the others.
        """
        actions = list(actions)
        forwards = deque(a.microbatch for a in actions if isinstance(a, Forward))
        outputs: list[Any] = []
        if forwards and self._activations_in is not None and not self._activations_in.is_posted:
            self._activations_in.post(microbatches[forwards[0]].place)
        self._streaming = endless and (self._streaming or bool(forwards))
        with kept(self._device):  # backwards and updates may draw too
            for action, following in zip_longest(actions, actions[1:]):
                if isinstance(action, Forward):
                    forwards.popleft()
                    # Of a batch that has yet to come, the first place is expected.
                    next_place = microbatches[forwards[0]].place if forwards else 0 if endless else None
                    outputs += self._forward(action.microbatch, microbatches[action.microbatch], next_place)
                elif isinstance(action, Backward):
                    if self._completing is not None and isinstance(following, Step):
                        self._completing()
                    self._backward(action.microbatch)
                else:
                    assert isinstance(action, Step)
                    with self._timeline.span("step", action.update):
                        if update is not None:
                            update()
        if not endless:
            self.flush()  # the receives are posted already: this waits for no computation
        return outputs

    def flush(self) -> None:
        """Wait until every message has arrived. Messages of a process that ends before are lost."""
        for sender in (self._activations_out, self._gradients_out):
            if sender is not None:
                sender.flush()

    def _forward(self, number: int, microbatch: Microbatch, next_place: int | None) -> list[Any]:
        """What the user's step returned, on the last stage; nothing on the others."""
        reseed(microbatch.seed, self._device)
        run = partial(self._run, "forward", number, microbatch.step, next_place)
        (output, arrival), token = self._weights.forward(run)
        tensors = output.tensors if isinstance(output, Departure) else [self._loss_of(output)]
        seeds: list[Tensor] = []
        gradients: Format = ()
        sent = 0
        if self._activations_out is None:
            seeds = [torch.full_like(t, microbatch.weight) for t in tensors]
        else:  # before all else: the next stage may be waiting
            gradients = gradient_format(self._activations_out.send(tensors, microbatch.place, self._gradients_taken))
            sent = self._activations_out.sent
            if not gradients:  # none will come back to confirm the message, nor hold this stage back
                self._activations_out.flush(keep=2)
        edges = [get_gradient_edge(t) for t in tensors if t.requires_grad]
        self._in_flight.append(_InFlight(number, edges, seeds, gradients, sent, arrival, token))
        self._post_gradient()
        return [output] if self._stage.is_last else []

    def _run(
        self, kind: str, number: int, step: Callable[[], Any], next_place: int | None
    ) -> tuple[Any, Arrival | None]:
        """Run a step on this stage: what came of it, and what had arrived."""
        timeline = self._timeline
        version = self._weights.reading if kind == "forward" else None
        if self._activations_in is None:
            with timeline.span(kind, number, version):
                return self._stage.run(step, None), None
        arrived: list[Arrival] = []
        with ExitStack() as recording:
            recording.enter_context(timeline.span("begin" if kind == "forward" else kind, number))

            def arrive() -> Arrival:
                recording.close()
                arrived.append(self._take_activation(number, next_place))
                recording.enter_context(timeline.span(kind, number, version))
                return arrived[0]

            output = self._stage.run(step, arrive, self._activations_in.expected)
        return output, arrived[0]

    def _backward(self, number: int) -> None:
        flight = self._in_flight[0]
        assert flight.number == number, "schedules run backwards in the order of the forwards"
        with self._weights.backward(flight.token), self._stage.backward():  # before it waits
            seeds = self._take_gradients(number, flight)
            self._in_flight.popleft()
            self._post_gradient()
            with self._timeline.span("backward", number):
                if flight.edges:
                    torch.autograd.backward(flight.edges, seeds)
            if self._gradients_out is not None:
                assert flight.arrival is not None
                self._gradients_out.send_gradients(flight.arrival.gradients(self._device))
                self._gradients_out.confirm(self._activations_in.acknowledged)

    # -- messages ------------------------------------------------------------------------------------------------

    def _take_activation(self, number: int, next_place: int | None) -> Arrival:
        """Wait for what the stage before sent, and post the receive of what it sends next, if it will."""
        if next_place is not None:
            self._activations_in.prepare(next_place)
        with self._timeline.span("receive", number):
            arrival = self._activations_in.take()
        assert arrival is not None, "a stream ends between batches"
        if next_place is not None:
            self._activations_in.post(next_place)
        return arrival

    def _post_gradient(self) -> None:
        """Post the receive for the next backward, if its forward has run."""
        if self._gradients_in is None or self._gradients_in.is_posted or not self._in_flight:
            return
        if self._in_flight[0].gradients:
            self._gradients_in.post_gradients(self._in_flight[0].gradients)

    def _take_gradients(self, number: int, flight: _InFlight) -> list[Tensor]:
        if self._gradients_in is None:
            return flight.seeds
        gradients: list[Tensor] = []
        if flight.gradients:
            if len(self._in_flight) > 1 and self._in_flight[1].gradients:
                self._gradients_in.prepare_gradients(self._in_flight[1].gradients)
            with self._timeline.span("receive", number):
                gradients = self._gradients_in.take_gradients()
            self._activations_out.confirm(flight.sent)
        self._gradients_taken += 1
        return gradients

    def end_stream(self) -> None:
        """End an endless list, after its last backward: receives posted on speculation are answered."""
        assert not self._in_flight, "drain before the stream ends"
        if not self._streaming:
            return
        self._streaming = False
        if self._activations_out is not None:
            self._activations_out.end(0, self._gradients_taken)
        if self._activations_in is not None:
            arrival = self._activations_in.take()
            assert arrival is None, "the stage before ends its stream at the same microbatch"
        self.flush()

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, step: Callable[[], Any], number: int = 0) -> Any:
        """Forward only: one message a batch. Each stage is one batch ahead of the next: it waits until its output has
        arrived, so that a process which ends after its last batch takes no message with it.

        Returns:
            What the step returned, on the last stage; None on the others.
        """
        if self._activations_in is not None:
            self._activations_in.post("evaluation")
        output, _ = self._run("evaluate", number, step, next_place=None)
        if not isinstance(output, Departure):
            return output
        assert self._activations_out is not None
        self._activations_out.send(output.tensors, "evaluation")
        self._activations_out.flush()
        return None


def _maybe(kind: type[Any], link: Link | None) -> Any:
    return None if link is None else kind(link)
