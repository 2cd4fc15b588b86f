"""Pipelines written out, as little code as can be: what an engine could reach at best on this machine.

Contestants like those of ``contestants.py``. They know what an engine has to find out: that a stage is a slice of the
layers, and that every message has the shape of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    OnChunk,
    Step,
    StepOfChunk,
    needed,
    placement,
    sent,
)
from lightning_parallel.schedules.named import SCHEDULES, Endless, endless
from tools.bench.contestants import Synchronous, place
from tools.bench.layers import MakeOptimizer, loss_of, sgd


class Bare(Synchronous):
    """A synchronous schedule. All receives of a batch are posted before it begins, into buffers that are kept. For
    backwards in halves autograd is asked twice, which costs nothing more where a chunk is one sleeping layer."""

    def __init__(
        self, layers: nn.Sequential, schedule: str, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd
    ) -> None:
        layout, groups = place(batch.device)
        lists = SCHEDULES[schedule](layout.stages, microbatches)
        self._group, self._rank = groups.along("pipeline"), layout.rank
        self._actions, places = lists[layout.stage], placement(lists)
        self._ranks = [layout.rank_at(pipeline=stage) for stage in places]  # of each chunk
        own = [chunk for chunk, stage in enumerate(places) if stage == layout.stage]
        self._last = len(places) - 1
        self.is_first, self.is_last = 0 in own, self._last in own
        each = len(layers) // len(places)
        self._chunks = {chunk: layers[chunk * each : (chunk + 1) * each] for chunk in own}
        self._optimizer = optimizer(p for chunk in self._chunks.values() for p in chunk.parameters())
        self._parts = torch.tensor_split(batch, microbatches)
        self._buffers = {
            message: torch.empty_like(self._parts[message.microbatch])
            for action in self._actions
            if (message := needed(action, len(places))) is not None
        }
        self._flight: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input and output of a forward
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def step(self) -> None:
        self._batch(self._posted(self._buffers))
        for one, _ in self._sent:
            one.wait()
        self._sent.clear()

    def _batch(self, works: Mapping[Message, dist.Work | None]) -> None:
        for action in self._actions:
            if isinstance(action, Step):
                continue
            message = needed(action, len(self._ranks))
            if message is not None and (work := works[message]) is not None:
                work.wait()
            result = self._run(action, None if message is None else self._buffers[message])
            message = sent(action, len(self._ranks))
            if message is not None and result is not None:
                self._send(message, result)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _run(self, action: OnChunk, incoming: Tensor | None) -> Tensor | None:
        """What an action hands on."""
        place = action.chunk, action.microbatch
        if isinstance(action, Forward):
            own = self._parts[action.microbatch % len(self._parts)]
            x = own if incoming is None else incoming.detach().requires_grad_()
            output = self._chunks[action.chunk](x)
            if action.chunk == self._last:
                output = loss_of(output) / len(self._parts)
            self._flight[place] = x, output
            return output.detach()
        if isinstance(action, BackwardInput):
            x, output = self._flight[place]
            (gradient,) = torch.autograd.grad(output, x, incoming, retain_graph=True)
            return gradient
        x, output = self._flight.pop(place)
        if isinstance(action, Backward):
            torch.autograd.backward(output, incoming)
            return x.grad
        key = Message("gradient", action.chunk, action.microbatch)  # the second half needs it again
        parameters = [p for name, p in self._chunks[action.chunk].named_parameters() if name.endswith("weight")]
        for parameter, found in zip(
            parameters, torch.autograd.grad(output, parameters, self._buffers.get(key)), strict=True
        ):
            parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)
        return None

    def _ends(self, message: Message) -> tuple[int, int, int]:
        """The ranks that send and receive a message, and its tag."""
        before, after = self._ranks[message.cut], self._ranks[message.cut + 1]
        forward = message.kind == "activation"
        return (before, after, 2 * message.cut) if forward else (after, before, 2 * message.cut + 1)

    def _posted(self, buffers: Mapping[Message, Tensor]) -> dict[Message, dist.Work | None]:
        """The receives of a batch; None for what is handed over on this stage."""
        return {message: self._receive(message, buffer) for message, buffer in buffers.items()}

    def _receive(self, message: Message, buffer: Tensor) -> dist.Work | None:
        source, _, tag = self._ends(message)
        if source == self._rank:
            return None
        return _work(dist.irecv(buffer, source, group=self._group, tag=tag))

    def _send(self, message: Message, tensor: Tensor) -> None:
        _, to, tag = self._ends(message)
        if to == self._rank:
            self._buffers[message].copy_(tensor)
        else:
            self._sent.append((_work(dist.isend(tensor, to, group=self._group, tag=tag)), tensor))


def _sent(tensor: Tensor, to: int, group: dist.ProcessGroup | None) -> tuple[dist.Work, Tensor]:
    """The tensor too: it has to stay until it has been sent."""
    return _work(dist.isend(tensor, to, group=group)), tensor


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is of the group"
    return work


class BareOnwards(Bare):
    """The same, but a stage goes on to the next batch by itself. The receives of a batch are posted before the batch
    before it begins, into a second set of buffers; its sends are waited for after the next one."""

    def __init__(
        self, layers: nn.Sequential, schedule: str, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd
    ) -> None:
        super().__init__(layers, schedule, batch, microbatches, optimizer)
        self._group = dist.new_group()  # of its own: receives that were posted ahead stay when others run
        self._others = {message: torch.empty_like(buffer) for message, buffer in self._buffers.items()}
        self._coming: dict[Message, dist.Work | None] | None = None

    def step(self) -> None:
        works = self._posted(self._buffers) if self._coming is None else self._coming
        self._coming = self._posted(self._others)
        earlier, self._sent = self._sent, []
        self._batch(works)
        for one, _ in earlier:
            one.wait()
        self._buffers, self._others = self._others, self._buffers


class BareEndless(Bare):
    """An endless list. Receives are posted a batch ahead. Weights have no versions: a sleeping layer keeps what it
    read by itself, so updates may be made in place."""

    def __init__(
        self, layers: nn.Sequential, schedule: Endless, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd
    ) -> None:
        super().__init__(layers, schedule, batch, microbatches, optimizer)
        layout, _ = place(batch.device)
        self._group = dist.new_group()  # of its own: receives that were posted ahead stay when others run
        self._list = endless(schedule, layout.stages, layout.stage)
        self._optimizers = {chunk: optimizer(module.parameters()) for chunk, module in self._chunks.items()}
        self._buffers.clear()
        self._works: dict[Message, dist.Work | None] = {}
        self._coming: list[Action] | None = None

    def step(self) -> None:
        now = self._fed() if self._coming is None else self._coming
        self._coming = self._fed()
        self._perform(now)

    def drain(self) -> None:
        owed = [*(self._coming or ()), *self._list.drain()]
        self._coming = None
        self._post(owed)
        self._perform(owed)
        for one, _ in self._sent:
            one.wait()
        self._sent.clear()

    def _fed(self) -> list[Action]:
        """The next batch's part of the list, with its receives posted."""
        actions = [*self._list.feed(len(self._parts))]
        self._post(actions)
        return actions

    def _post(self, actions: Iterable[Action]) -> None:
        for action in actions:
            message = None if isinstance(action, Step) else needed(action, len(self._ranks))
            if message is not None and message not in self._works:
                if self._ends(message)[0] != self._rank:
                    self._buffers[message] = torch.empty_like(self._parts[0])
                self._works[message] = self._receive(message, self._buffers.get(message, self._parts[0]))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Step):
                for chunk in (action.chunk,) if isinstance(action, StepOfChunk) else self._optimizers:
                    self._optimizers[chunk].step()
                    self._optimizers[chunk].zero_grad()
                continue
            message = needed(action, len(self._ranks))
            if message is not None and (work := self._works.pop(message)) is not None:
                work.wait()
            result = self._run(action, None if message is None else self._buffers[message])
            if isinstance(action, Forward) and message is not None:
                del self._buffers[message]
            elif isinstance(action, Backward | BackwardWeight):
                self._buffers.pop(Message("gradient", action.chunk, action.microbatch), None)
            message = sent(action, len(self._ranks))
            if message is not None and result is not None:
                self._send(message, result)
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]

    def _send(self, message: Message, tensor: Tensor) -> None:
        if self._ends(message)[1] == self._rank:
            self._buffers[message] = tensor
        else:
            super()._send(message, tensor)


class BareAsync:
    """Two asynchronous stages by hand, as little code as can be: what an engine could reach at best.

    Receives are posted ahead, into buffers of a known shape; weight versions are copies, made once an update.
    """

    def __init__(self, layers: nn.Sequential, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd) -> None:
        assert dist.get_world_size() == 2
        layout, _ = place(batch.device)
        self.is_first, self.is_last = layout.stage == 0, layout.is_last_stage
        # Groups of its own: a receive that was posted ahead stays when others run.
        forward, backward = dist.new_group([0, 1]), dist.new_group([0, 1])
        self._in, self._out = (backward, forward) if self.is_first else (forward, backward)
        half = len(layers) // 2
        self._module = layers[:half] if self.is_first else layers[half:]
        self._optimizer = optimizer(self._module.parameters())
        self._parts = torch.tensor_split(batch, microbatches)
        self._peer = 1 - dist.get_rank()
        self._receiving: tuple[dist.Work, Tensor] | None = None
        self._sending: tuple[dist.Work, Tensor] | None = None
        self._flight: Tensor | None = None  # of the first stage: the output whose gradient is to come
        self._backwards = 0
        # The last stage has nothing in flight when it steps.
        self._versions = [self._copy()] if self.is_first else []

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone().requires_grad_() for name, p in self._module.named_parameters()}

    def step(self) -> None:
        for part in self._parts:
            if self.is_last:
                self._both(part)
            else:
                output = torch.func.functional_call(self._module, self._versions[-1], (part,))
                self._send(output.detach())
                if self._flight is not None:
                    self._backward()
                self._flight = output

    def drain(self) -> None:
        if self._flight is not None:
            self._backward()
        self._flight = None
        self._wait_for_sends()

    def _both(self, part: Tensor) -> None:
        x = self._receive(part).requires_grad_()
        (loss_of(self._module(x)) / len(self._parts)).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        self._send(x.grad)
        self._count()

    def _backward(self) -> None:
        assert self._flight is not None
        self._flight.backward(self._receive(self._flight))  # type: ignore[no-untyped-call]
        self._count()

    def _count(self) -> None:
        self._backwards += 1
        if self._backwards % len(self._parts):
            return
        for version in self._versions:
            for name, parameter in self._module.named_parameters():
                gradient, version[name].grad = version[name].grad, None
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.is_first:
            # The output in flight was made with the version before the new one.
            self._versions = [self._versions[-1], self._copy()]

    def _send(self, tensor: Tensor) -> None:
        self._wait_for_sends()
        self._sending = _sent(tensor, self._peer, self._out)

    def _wait_for_sends(self) -> None:
        if self._sending is not None:
            self._sending[0].wait()
        self._sending = None

    def _receive(self, like: Tensor) -> Tensor:
        work, buffer = self._receiving or self._post(like)
        work.wait()
        self._receiving = self._post(like)
        return buffer

    def _post(self, like: Tensor) -> tuple[dist.Work, Tensor]:
        buffer = torch.empty_like(like)
        return _work(dist.irecv(buffer, self._peer, group=self._in)), buffer
