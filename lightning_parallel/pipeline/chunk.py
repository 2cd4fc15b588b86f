"""A chunk of the step on this rank: its messages, its forwards and backwards, and what is in flight between them.

::

    chunk c, 1F1B:      F(k)                                B(k - w)
                        take activation k      <-- c-1      take gradient k - w          <-- c+1
                        run this chunk's layers             run autograd
                        send the output        --> c+1      send the input's gradient    --> c-1
                        expect gradient k
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.backward.split import WeightGradients, begin_backward
from lightning_parallel.gradients.swapping import gradients_apart
from lightning_parallel.losses.graph import Term, scalar
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.messages.arrival import Arrival
from lightning_parallel.messages.ends import Ends, WayIn, WayOut
from lightning_parallel.messages.message import Format, format_of, gradient_format
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.pipeline.validation import TakenBack, Validation
from lightning_parallel.pipeline.weights import Half, WeightVersions
from lightning_parallel.private.torch.autograd import run_backward
from lightning_parallel.private.torch.modules import parameters_of
from lightning_parallel.seeding import Generators
from lightning_parallel.timeline.recording import Timeline


@dataclass(frozen=True)
class Again:
    """Runs a chunk's part of a microbatch's step again, without a backward.

    Attributes:
        arrived: the tensors that arrived for it; None if they weren't kept.
        run: runs a step with such activations. It returns the loss in the last chunk, in others what would be sent on.
    """

    chunk: int
    arrived: list[Tensor] | None
    run: Callable[[Callable[[], Any], Sequence[Tensor]], Any]


@dataclass(frozen=True)
class Trial:
    """An experiment that follows a microbatch's forward in a chunk.

    Attributes:
        wants_activations: whether the tensors that arrive are to be kept for it; called with whether the chunk is the
            last.
        run: called with an :class:`Again`, the loss in the last chunk, and its terms if they have been read.
    """

    wants_activations: Callable[[bool], bool]
    run: Callable[[Again, Tensor | None, list[Term]], None]


# A context around autograd's part of an action that completes a chunk's gradients for an update (both halves of a
# backward do). It is given the chunk, and the edges at which the backward begins; none for a second half.
Completing = Callable[[int, Sequence[GradientEdge]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Microbatch:
    """The work of one microbatch.

    Attributes:
        step: the user's step, bound to this microbatch. What it returns in the last chunk is given to ``loss_of``.
        scale: the loss scale of 16-bit precision; 1 otherwise.
        loss: the whole batch's loss, which is made of its microbatches' losses.
        index: the microbatch's number within its batch, for which formats of messages are remembered.
        seed: the seed of the random numbers that its forward draws.
        ends_batch: whether it is the batch's last.
        trial: tests whether this microbatch and its neighbour, run as one, give what both give apart; None for none.
        validation: of the update before the batch, with the batch's first microbatch; None where there is nothing to
            validate.
    """

    step: Callable[[], Any]
    scale: float
    loss: BatchLoss
    index: int
    seed: int
    ends_batch: bool
    trial: Trial | None = None
    validation: Validation | None = None


@dataclass(frozen=True)
class _Sent:
    """What a forward has sent to a later chunk that answers with gradients: edges of the graph, not tensors, so an
    output's memory is free once it is sent.

    Attributes:
        edges: where the backward begins that is given its gradients.
        number: of activation messages sent on this way, this one included.
    """

    way: WayOut
    edges: list[GradientEdge]
    number: int


@dataclass(frozen=True)
class _InFlight:
    """What a forward leaves for its backward.

    Attributes:
        sent: to later chunks; empty in the last chunk, where ``work.loss`` knows where the backward begins.
        taken: the formats of what has come from each earlier chunk.
        token: what the weights' backward needs of their forward; None for the module's own parameters.
    """

    number: int
    work: Microbatch
    sent: list[_Sent]
    taken: list[tuple[WayIn, Format]]
    arrival: Arrival | None
    token: Any


class Chunk:
    """One of this rank's chunks.

    Args:
        index: the chunk's number in the order of a forward.
        stage: runs the user's step, cut to this chunk.
        ends: the ends of its ways of messages.
        generators: the random generators that forwards draw from.
        loss_of: takes the loss out of what the user's step returned, in the last chunk.
        weights: decides which version of the weights a forward uses; None for the module's own parameters.

    Attributes:
        is_ahead: does it expect the first activation of a batch that is yet to come? Then so does the next chunk.
        senders: of its messages.
    """

    def __init__(
        self,
        index: int,
        stage: Stage,
        ends: Ends,
        device: torch.device,
        *,
        generators: Generators,
        loss_of: Callable[[Any], Tensor],
        weights: WeightVersions | None,
        timeline: Timeline,
    ) -> None:
        self._index, self._stage, self._ends, self._device = index, stage, ends, device
        self._generators, self._loss_of, self._weights = generators, loss_of, weights
        self._span = partial(timeline.span, chunk=stage.chunks.index(index))
        # Where modules keep their parameters, not the parameters: gathering replaces them, and pruning renames them.
        # What other stages hold stays absent.
        stores = (parameters_of(each) for each in stage.module.modules())
        self._stores = [store for store in stores if any(not isinstance(p, AbsentTensor) for p in store.values())]
        self.senders = [way.activations for way in ends.out_of.values()] + [way.gradients for way in ends.into.values()]
        self._in_flight: deque[_InFlight] = deque()
        self._second_halves: deque[tuple[_InFlight, WeightGradients]] = deque()
        self.is_ahead = False
        self._is_unanswered = False  # do no gradients come back?
        self._turn = len(stage.partition.placement) // 2  # in a V, the first chunk on the way back
        # Until forwards are known to count: what expects their gradients, to be called then. None: they count.
        self._not_accepted: list[Callable[[], None]] | None = None

    # -- forward -------------------------------------------------------------------------------------------------

    def begin(self, indices: Sequence[int], *, more_follow: bool) -> None:
        """Begin a list: expect the activations of the microbatches whose forwards are in it.

        Args:
            indices: their indices, in order.
            more_follow: a batch will come after it, of which the first activation is expected already.
        """
        # If no gradients come back to confirm messages, this limits how far the chunk runs ahead: the next one has read
        # all of them but one. A wait in the middle of a list could deadlock.
        for way in self._ends.out_of.values() if self._is_unanswered else ():
            way.activations.flush(keep=1)
        coming = [*indices, 0] if more_follow else indices
        for index in coming[1:] if self.is_ahead else coming:
            for source in self._ends.into.values():
                source.activations.expect(index)
        self.is_ahead = more_follow

    def forward(self, number: int, microbatch: Microbatch) -> list[Any]:
        """Run the forward of a microbatch, which says what is to be run, and with which random numbers.

        Returns:
            What the user's step returned, in the last chunk; an empty list in the others.

        Raises:
            TakenBack: the update before the batch doesn't hold.
        """
        self._generators.seed(microbatch.seed)
        trial, is_last = microbatch.trial, not self._ends.out_of
        keeps = trial is not None and trial.wants_activations(is_last)
        arrival, taken = self._receive(number, microbatch.validation)
        kept = [] if arrival is None else arrival.copies() if keeps else None
        weights = self._weights
        with self._span("forward", number, None if weights is None else weights.reading):
            run = partial(self._stage.run, microbatch.step, arrival, self._index)
            output, token = (run(), None) if weights is None else weights.forward(run)
        sent: list[_Sent] = []
        loss: Tensor | None = None
        terms: list[Term] = []
        if is_last:
            loss = self._loss_of(output)
            terms = microbatch.loss.add(microbatch.index, loss)
        else:
            sent = self._send(output, microbatch, arrival)
        if trial is not None:
            trial.run(Again(self._index, kept, self._again), loss, terms)
        self._in_flight.append(_InFlight(number, microbatch, sent, taken, arrival, token))
        return [output] if is_last else []

    def _receive(
        self, number: int, validation: Validation | None = None
    ) -> tuple[Arrival | None, list[tuple[WayIn, Format]]]:
        """Wait for the activations of a microbatch, and return them with the format of each message and the way it came
        on; None in the first chunk."""
        if validation is not None and self._index < self._turn:
            self._not_accepted = []
        if not self._ends.into:
            return None, []
        tensors, taken = list[Tensor](), list[tuple[WayIn, Format]]()
        format: Format = ()
        with self._span("receive", number):
            for chunk in self._stage.cuts[self._index].into:
                way = self._ends.into[chunk]
                message = way.activations.take()
                if message is None:
                    assert validation is not None, "else a stream ends between batches"
                    raise TakenBack
                found, described = message
                if validation is not None and chunk == self._index - 1 and self._index < self._turn:
                    *found, square = found
                    described = described[:-1]
                    validation.arrived(square)
                tensors, format = [*tensors, *found], (*format, *described)
                taken.append((way, described))
        if validation is not None and self._index == self._turn:
            validation.check()
        return Arrival(tensors, format), taken

    def _send(self, output: list[Tensor], microbatch: Microbatch, arrival: Arrival | None) -> list[_Sent]:
        sent: list[_Sent] = []
        for chunk, count in self._stage.cuts[self._index].departing.items():
            part, output = output[:count], output[count:]
            way, is_next = self._ends.out_of[chunk], chunk == self._index + 1
            if is_next and microbatch.ends_batch:
                part = self._wanting_the_factor(part, arrival)
            if is_next and microbatch.validation is not None and chunk < self._turn:
                part = [*part, microbatch.validation.square]
            gradients = gradient_format(way.activations.send(part, microbatch.index, way.gradients.taken))
            if is_next:
                self._is_unanswered = not gradients
            if gradients:
                expect = partial(way.gradients.expect, gradients)
                expect() if self._not_accepted is None else self._not_accepted.append(expect)
                edges = [get_gradient_edge(tensor) for tensor in part if tensor.requires_grad]
                sent.append(_Sent(way, edges, way.activations.sent))
        return sent

    def _wanting_the_factor(self, output: list[Tensor], arrival: Arrival | None) -> list[Tensor]:
        """The output of a batch's last microbatch. The factor of the batch's gradients comes back with a gradient. If
        none would come, but earlier microbatches may have made gradients here, one tensor asks for one."""
        uses, parameters = self._stage.partition.uses, self._stage.named_parameters
        if any(tensor.requires_grad for tensor in output) or not (
            (arrival is not None and arrival.anchor is not None)
            or any(p.requires_grad and self._index in uses[name] for name, p in parameters().items())
        ):
            return output
        first = next((i for i, tensor in enumerate(output) if tensor.is_floating_point()), None)
        return [t.detach().requires_grad_() if i == first else t for i, t in enumerate(output)]

    def _again(self, step: Callable[[], Any], tensors: Sequence[Tensor]) -> Any:
        """Run a step on given activations. Returns its loss in the last chunk, in others what would be sent on."""
        format = format_of([tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors])
        arrival = Arrival([*tensors], format) if self._ends.into else None
        with self._generators.kept():
            output = self._stage.run(step, arrival, self._index, trial=True)
        return output if self._ends.out_of else self._loss_of(output)

    def evaluate(self, step: Callable[[], Any], number: int) -> Any:
        """Run a forward only, with one message a batch. It waits until the next stage has the output, since a process
        that ends loses the messages that haven't arrived.

        Args:
            step: the user's step, bound to a batch.

        Returns:
            What the step returned, in the last chunk; None in the others.
        """
        for source in self._ends.into.values():
            source.activations.expect("evaluation")
        arrival, _ = self._receive(number)
        with self._span("evaluate", number):
            output = self._stage.run(step, arrival, self._index)
        if not self._ends.out_of:
            return output
        for chunk, count in self._stage.cuts[self._index].departing.items():
            self._ends.out_of[chunk].activations.send(output[:count], "evaluation")
            self._ends.out_of[chunk].activations.flush()
            output = output[count:]
        return None

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(self, number: int, completing: Completing | None, *, in_halves: bool) -> None:
        """Run the backward of a microbatch.

        Args:
            completing: a context for a backward that completes gradients for an update; None for others.
            in_halves: leave the gradients that nobody waits for to :meth:`second_half`.
        """
        flight = self._in_flight[0]
        assert flight.number == number, "schedules run backwards in the order of the forwards"
        work = flight.work
        half: Half = "first" if in_halves else "whole"
        # Entered before it waits for the gradient: an asynchronous stage takes the weights of the forward meanwhile.
        with self._around_backward(flight, half), self._stage.backward():
            edges, gradients = list[GradientEdge](), list[Tensor]()
            if not self._ends.out_of:
                edges, gradients = work.loss.begin(work.index, work.scale)
            for sent in flight.sent:
                with self._span("receive", number):
                    message = sent.way.gradients.take()
                assert message is not None, "there is no end of stream of gradients"
                (*found, factor), format = message
                work.loss.take_factor(factor, work.index)
                # No backward begins from zeros: parameters would get zeros that have None in one process.
                for edge, gradient, each in zip(sent.edges, found, format[:-1], strict=True):
                    if not each.requires_grad:  # else there is none
                        edges.append(edge)
                        gradients.append(gradient)
                sent.way.activations.confirm(sent.number)
            self._in_flight.popleft()
            context = nullcontext() if completing is None else completing(self._index, edges)
            with context, self._span("backward input" if in_halves else "backward", number):
                if in_halves:
                    anchor = None if flight.arrival is None else flight.arrival.anchor
                    inputs = [] if anchor is None else [anchor]
                    begun = begin_backward(edges, gradients, inputs)
                    self._second_halves.append((flight, begun))
                elif edges:
                    run_backward(edges, gradients)
            back = [] if flight.arrival is None else flight.arrival.gradients()
            for way, format in flight.taken:
                if wanted := gradient_format(format):
                    count = len(wanted) - 1
                    factor = scalar(work.loss.factor, torch.float64, self._device)
                    way.gradients.send([*back[:count], factor], wanted)
                    back = back[count:]
                way.gradients.confirm(way.activations.acknowledged)

    def second_half(self, number: int, completing: Completing | None) -> None:
        """Run the second half of a microbatch's backward. ``completing`` is as in :meth:`backward`."""
        flight, gradients = self._second_halves.popleft()
        assert flight.number == number, "second halves run in the order of the first ones"
        context = nullcontext() if completing is None else completing(self._index, ())
        with self._span("backward weight", number), self._around_backward(flight, "second"):
            with self._stage.backward(), context:
                gradients.run()

    def _around_backward(self, flight: _InFlight, half: Half) -> AbstractContextManager[None]:
        """A context for a backward, or for a half of it: with the weights of its forward, where there are versions of
        them; otherwise only with memory of its own for each first gradient."""
        if self._weights is not None:
            ends = flight.work.ends_batch
            return self._weights.backward(flight.token, flight.work.loss, half, ends_batch=ends)
        return gradients_apart([p for store in self._stores for p in store.values() if p is not None])

    # -- a batch that may be dropped, or won't come ------------------------------------------------------------------

    def accept(self) -> None:
        """The batch's forwards count, so their gradients will come."""
        waiting, self._not_accepted = self._not_accepted, None
        for expect in waiting or ():
            expect()

    def end(self) -> None:
        """Tell the next chunk that no more messages of this batch will come: its forwards don't count, or there is no
        such batch."""
        last = self._in_flight[-1].work if self._in_flight else None
        coming = 0 if last is None or last.ends_batch else last.index + 1
        for way in self._ends.out_of.values():
            way.activations.end(coming, way.gradients.taken)

    def drop(self) -> None:
        """Drop what has run of this batch, and the messages that have come for it, up to the end that the previous
        chunk has told of."""
        self._in_flight.clear()
        self._not_accepted = None
        self.is_ahead = False
        for source in self._ends.into.values():
            source.activations.drop()
