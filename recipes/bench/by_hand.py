"""Pipelines written out, as little code as can be: what an engine could reach at best on this machine.

Contestants like those of ``contestants.py``. They know what an engine has to find out: that a stage is a slice of the
layers, and that every message has the shape of a microbatch.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.pipeline.schedule import SCHEDULES, Backward, Forward
from recipes.bench.contestants import Synchronous, place
from recipes.bench.layers import MakeOptimizer, loss_of, sgd


class Bare(Synchronous):
    """A synchronous schedule. All receives of a batch are posted before it begins, into buffers that are kept."""

    def __init__(
        self, layers: nn.Sequential, schedule: str, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd
    ) -> None:
        layout, groups = place()
        self._links = groups.links
        self.is_first, self.is_last = layout.is_first_stage, layout.is_last_stage
        each = len(layers) // layout.stages
        self._stage = layers[layout.stage * each : (layout.stage + 1) * each]
        self._optimizer = optimizer(self._stage.parameters())
        self._actions = SCHEDULES[schedule](layout.stages, microbatches)[layout.stage]
        self._parts = torch.tensor_split(batch, microbatches)
        self._before = 0 if self.is_first else layout.rank_at(pipeline=layout.stage - 1)
        self._after = 0 if self.is_last else layout.rank_at(pipeline=layout.stage + 1)
        self._activations = [] if self.is_first else [torch.empty_like(part) for part in self._parts]
        self._gradients = [] if self.is_last else [torch.empty_like(part) for part in self._parts]

    def step(self) -> None:
        links = self._links
        activations = [_work(dist.irecv(x, self._before, group=links.forward_in)) for x in self._activations]
        gradients = [_work(dist.irecv(g, self._after, group=links.backward_in)) for g in self._gradients]
        in_flight: deque[tuple[Tensor, Tensor]] = deque()
        sent: list[tuple[dist.Work, Tensor]] = []
        for action in self._actions:
            if isinstance(action, Forward):
                number = action.microbatch
                x = self._parts[number]
                if not self.is_first:
                    activations[number].wait()
                    x = self._activations[number].detach().requires_grad_()
                output = self._stage(x)
                if self.is_last:
                    output = loss_of(output) / len(self._parts)
                else:
                    sent.append(_sent(output.detach(), self._after, links.forward_out))
                in_flight.append((x, output))
            elif isinstance(action, Backward):
                x, output = in_flight.popleft()
                if not self.is_last:
                    gradients[action.microbatch].wait()
                torch.autograd.backward(output, None if self.is_last else self._gradients[action.microbatch])
                if not self.is_first:
                    assert x.grad is not None
                    sent.append(_sent(x.grad, self._before, links.backward_out))
        self._optimizer.step()
        self._optimizer.zero_grad()
        for work, _ in sent:
            work.wait()


def _sent(tensor: Tensor, to: int, group: dist.ProcessGroup | None) -> tuple[dist.Work, Tensor]:
    """The tensor too: it has to stay until it has been sent."""
    return _work(dist.isend(tensor, to, group=group)), tensor


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is of the group"
    return work


class BareAsync:
    """Two asynchronous stages by hand, as little code as can be: what an engine could reach at best.

    Receives are posted ahead, into buffers of a known shape; weight versions are copies, made once an update.
    """

    def __init__(self, layers: nn.Sequential, batch: Tensor, microbatches: int, optimizer: MakeOptimizer = sgd) -> None:
        assert dist.get_world_size() == 2
        layout, _ = place()
        self.is_first, self.is_last = layout.is_first_stage, layout.is_last_stage
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
