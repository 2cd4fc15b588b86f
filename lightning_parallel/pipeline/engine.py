"""Runs a schedule on a stage.

The schedule says what is computed and when; the messages follow from it. A forward waits for the activation that the
previous stage sent, a backward for the gradient that the next stage sent. Each receive is posted as soon as the one
before has been read, so it is in flight while the stage computes. The engine knows no Lightning: what a microbatch's
step is, what an update does and which weights a forward uses are given to it::

    on stage s, 1F1B:   F(k)                                B(k - w)
                        begin the user's step               set up the weights
                        take activation k      <-- s-1      take gradient k - w          <-- s+1
                        post activation k + 1               post gradient k - w + 1
                        run this stage's layers             run autograd
                        send the output        --> s+1      send the input's gradient    --> s-1

A forward waits inside the user's step, at the first absent layer whose output the message holds. The code before that
layer runs while the message is on its way: in a deep model, a millisecond for the absent layers.
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

from lightning_parallel.groups import Links
from lightning_parallel.layout import Layout
from lightning_parallel.pipeline.arrival import Arrival, Departure
from lightning_parallel.pipeline.channel import Link, Receiver, Sender
from lightning_parallel.pipeline.message import Format, gradient_format
from lightning_parallel.pipeline.schedule import Action, Backward, Forward, Step
from lightning_parallel.pipeline.seeding import TorchGenerators
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.timeline import Timeline
from lightning_parallel.pipeline.weights import CurrentWeights, Weights


@dataclass(frozen=True)
class Microbatch:
    """The work of one microbatch.

    Attributes:
        step: the user's step, bound to this microbatch. On the last stage its result is given to ``loss_of``.
        weight: the factor of its loss in the update: its part of the batch, accumulation, and loss scale.
        place: its index within its batch: the place in the schedule for which formats of messages are remembered.
        seed: of the random numbers that its forward draws.
        begins_update: it is the first of an update.
    """

    step: Callable[[], Any]
    weight: float
    place: int
    seed: int
    begins_update: bool


@dataclass(frozen=True)
class _InFlight:
    """What a forward leaves for its backward: edges of the graph, not tensors, so an output's memory is free once sent.

    Attributes:
        number: of the microbatch.
        edges: where the backward begins.
        seeds: on the last stage, what it begins with: the weight of the loss.
        gradients: elsewhere, the format of what it begins with, which the next stage will send.
        sent: the number of activation messages sent, this one included.
        arrival: what arrived.
        token: for ``Weights.backward``.
    """

    number: int
    edges: list[GradientEdge]
    seeds: list[Tensor]
    gradients: Format
    sent: int
    arrival: Arrival | None
    token: Any


class Engine:
    """Runs actions on this rank's stage.

    Args:
        stage: what runs here.
        layout: where the neighbours are.
        links: to them.
        device: of this rank.
        loss_of: takes the loss out of what the user's step returned, on the last stage.
        weights: which weights a forward uses; by default the module's own.
        timeline: records what ran when.
        completing: called before the last backward of an update, the one that a ``Step`` follows.
    """

    def __init__(
        self,
        stage: Stage,
        layout: Layout,
        links: Links,
        device: torch.device,
        *,
        loss_of: Callable[[Any], Tensor],
        weights: Weights | None = None,
        timeline: Timeline | None = None,
        completing: Callable[[], None] | None = None,
    ) -> None:
        self._stage = stage
        self._device = device
        self._loss_of = loss_of
        self._weights: Weights = weights or CurrentWeights()
        self._timeline = timeline or Timeline(enabled=False)
        self._completing = completing
        self._generators = TorchGenerators(device)
        self._in_flight: deque[_InFlight] = deque()
        self._streaming = False  # endless: every stage but the first has posted a receive for a batch yet to come
        self._gradients_taken = 0  # gradient messages, empty ones included
        self._rounded_off = 0.0  # of the weights of the update's losses

        def link(group: dist.ProcessGroup | None, neighbour: int) -> Link | None:
            if group is None:
                return None
            peer = layout.rank_at(pipeline=neighbour)
            return Link(group, peer, layout.describe(peer), device)

        before, after = layout.stage - 1, layout.stage + 1
        self._activations_in = _over(link(links.forward_in, before), Receiver)
        self._activations_out = _over(link(links.forward_out, after), Sender)
        self._gradients_in = _over(link(links.backward_in, after), Receiver)
        self._gradients_out = _over(link(links.backward_out, before), Sender)

    @property
    def activations_held(self) -> int:
        """The microbatches whose forward has run here and whose backward hasn't."""
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
            endless: more forwards will come in another call (or :meth:`end_stream`), so the first one's activation is
                received ahead.

        Returns:
            What the user's step returned for each forward, on the last stage; an empty list on the others.

        Raises:
            PeerLostError: a neighbouring stage has stopped.
            RuntimeError: what the user's step, ``loss_of`` or a stage that finds layers out of order raises.
        """
        actions = list(actions)
        forwards = deque(a.microbatch for a in actions if isinstance(a, Forward))
        outputs: list[Any] = []
        if forwards and self._activations_in is not None:
            self._activations_in.post(microbatches[forwards[0]].place)
        self._streaming = endless and (self._streaming or bool(forwards))
        with self._generators.kept():  # backwards and updates may draw too
            for action, following in zip_longest(actions, actions[1:]):
                if isinstance(action, Forward):
                    forwards.popleft()
                    # Of a batch that is yet to come, the first place is expected.
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
        """Wait until every message has arrived. Messages of a process that ends before that are lost."""
        for sender in (self._activations_out, self._gradients_out):
            if sender is not None:
                sender.flush()

    def _forward(self, number: int, microbatch: Microbatch, next_place: int | None) -> list[Any]:
        """What the user's step returned, on the last stage; nothing on the others."""
        self._generators.seed(microbatch.seed)
        run = partial(self._run, "forward", number, microbatch.step, next_place)
        (output, arrival), token = self._weights.forward(run)
        tensors = output.tensors if isinstance(output, Departure) else [self._loss_of(output)]
        seeds: list[Tensor] = []
        gradients: Format = ()
        sent = 0
        if self._activations_out is None:
            seeds = [self._loss_weight(tensors[0], microbatch)]
        else:  # before all else, since the next stage may be waiting
            gradients = gradient_format(self._activations_out.send(tensors, microbatch.place, self._gradients_taken))
            sent = self._activations_out.sent
            if not gradients:  # no gradient will come back to confirm the message, nor hold this stage back
                self._activations_out.flush(keep=2)
        edges = [get_gradient_edge(t) for t in tensors if t.requires_grad]
        self._in_flight.append(_InFlight(number, edges, seeds, gradients, sent, arrival, token))
        self._post_gradients()
        return [output] if self._stage.is_last else []

    def _loss_weight(self, loss: Tensor, microbatch: Microbatch) -> Tensor:
        """The weight of a loss, as a gradient of its dtype.

        In bf16, 1/24 is rounded up by 0.2 %, and every gradient would be too large by as much. So the rounding error of
        one microbatch's weight is added to the next one's weight. The weights of an update then have the right sum.
        """
        weight = microbatch.weight
        if torch.finfo(loss.dtype).bits < 32:
            weight += 0.0 if microbatch.begins_update else self._rounded_off
            self._rounded_off = weight - torch.tensor(weight, dtype=loss.dtype).item()
        return torch.full_like(loss, weight)

    def _run(
        self, kind: str, number: int, step: Callable[[], Any], next_place: int | None
    ) -> tuple[Any, Arrival | None]:
        """Run a step on this stage. Returns what came of it, and what had arrived."""
        timeline, receiver = self._timeline, self._activations_in
        version = self._weights.reading if kind == "forward" else None
        if receiver is None:
            with timeline.span(kind, number, version):
                return self._stage.run(step, None), None
        arrived: list[Arrival] = []
        with ExitStack() as recording:
            recording.enter_context(timeline.span("begin" if kind == "forward" else kind, number))

            def arrive() -> Arrival:
                recording.close()
                with timeline.span("receive", number):
                    arrival = receiver.take(then=next_place)
                assert arrival is not None, "a stream ends between batches"
                arrived.append(arrival)
                recording.enter_context(timeline.span(kind, number, version))
                return arrival

            output = self._stage.run(step, arrive, receiver.expected)
        return output, arrived[0]

    def _backward(self, number: int) -> None:
        flight = self._in_flight[0]
        assert flight.number == number, "schedules run backwards in the order of the forwards"
        with self._weights.backward(flight.token), self._stage.backward():  # before it waits
            gradients = flight.seeds
            if self._gradients_in is not None:
                if flight.gradients:
                    following = self._in_flight[1].gradients if len(self._in_flight) > 1 else ()
                    with self._timeline.span("receive", number):
                        gradients = self._gradients_in.take_gradients(then=following)
                    self._activations_out.confirm(flight.sent)
                self._gradients_taken += 1
            self._in_flight.popleft()
            self._post_gradients()
            with self._timeline.span("backward", number):
                if flight.edges:
                    torch.autograd.backward(flight.edges, gradients)
            if self._gradients_out is not None:
                assert flight.arrival is not None
                self._gradients_out.send_gradients(flight.arrival.gradients(self._device))
                self._gradients_out.confirm(self._activations_in.acknowledged)

    def _post_gradients(self) -> None:
        """Post the receive for the next backward, if its forward has run."""
        if self._gradients_in is not None and self._in_flight and self._in_flight[0].gradients:
            self._gradients_in.post_gradients(self._in_flight[0].gradients)

    def end_stream(self) -> None:
        """End an endless list, after its last backward: answer the receives that were posted on speculation."""
        assert not self._in_flight, "drain before the stream ends"
        if not self._streaming:
            return
        self._streaming = False
        if self._activations_out is not None:
            self._activations_out.end(0, self._gradients_taken)
        if self._activations_in is not None:
            arrival = self._activations_in.take()
            assert arrival is None, "the previous stage ends its stream at the same microbatch"
        self.flush()

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, step: Callable[[], Any], number: int = 0) -> Any:
        """Forward only: one message a batch. Each stage is one batch ahead of the next. The call returns when the
        output has arrived: messages of a process that has ended would be lost.

        Args:
            step: the user's step, bound to a batch.
            number: of the batch, for the timeline.

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


def _over(link: Link | None, kind: type[Any]) -> Any:
    """A sender or a receiver over a link; None where there is no neighbour."""
    return None if link is None else kind(link)
