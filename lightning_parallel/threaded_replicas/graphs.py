"""The replicas' autograd graphs as one node of the graph around them::

    weights ----+-------------------------------------+---> outputs ---> join, loss
                |   replica 0: leaves -> graph -> out |
                |   replica 1: leaves -> graph -> out |
                +-------------------------------------+

On the CPU one thread runs the backward of a graph. So each replica has a graph that ends at leaves of its own, and the
node's backward goes through these graphs in the replicas' threads. The sum of what the leaves got, in the order of the
replicas, is the gradient of the weights. From outside there is one graph: hooks on parameters, ``.grad``, scaling and
accumulation see one gradient, as without replicas. For GPUs torch has a backward thread each, so one call does it.

A second derivative (``create_graph=True``) doesn't pass the node, and is refused. A second backward finds the
replicas' graphs if the first one was to retain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.batch import mapped, tensors
from lightning_parallel.threaded_replicas.replicate import Replica, reduce
from lightning_parallel.threaded_replicas.scatter import Share
from lightning_parallel.threaded_replicas.threads import ReplicaThreads
from lightning_parallel.torch_private import keeps_graph

_Gradients = list[Tensor | None]


def attach(
    results: list[Any],
    weights: Sequence[Tensor],
    replicas: list[Replica],
    shares: list[Share],
    threads: ReplicaThreads,
    in_turn: bool,
) -> list[Any]:
    """What the replicas returned, as part of the graph that ``weights`` and the shares' sources are in.

    Args:
        results: of each replica, nested containers of tensors.
        weights: the parameters that the replicas' leaves stand for.
        replicas: that ran.
        shares: of each replica.
        threads: for the backward.
        in_turn: run one replica's backward after the other's, as their forwards were run.
    """
    outputs: list[list[Tensor]] = []
    for result in results:
        outputs.append([tensor for tensor in tensors(result) if tensor.requires_grad])
    sources = [*weights, *(source for share in shares for source in share.sources)]
    if not (any(outputs) and sources):
        return results
    graphs = _Graphs(list(weights), replicas, shares, outputs, threads, in_turn)
    attached = iter(_Node.apply(graphs, *sources))
    return [mapped(result, lambda tensor: next(attached) if tensor.requires_grad else tensor) for result in results]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for outputs in graphs.outputs for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: outputs that replicas in threads have computed have no second derivative. Compute "
                "it inside of what a replica runs, with loss_on='replicas', or use one device."
            )
        return None, *ctx.graphs.backward(gradients)


@dataclass(slots=True)
class _Graphs:
    """What the node's backward needs.

    Attributes:
        weights: the model's trainable parameters.
        replicas: that ran.
        shares: of each replica.
        outputs: of each replica, those that are part of its graph.
        threads: for the backward.
        in_turn: run one backward after the other.
    """

    weights: list[Tensor]
    replicas: list[Replica]
    shares: list[Share]
    outputs: list[list[Tensor]]
    threads: ReplicaThreads
    in_turn: bool

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """From gradients of the outputs, replica by replica, to those of the weights and of the shares' sources."""
        keep = keeps_graph()
        arriving = iter(gradients)
        arrived = [[next(arriving) for _ in outputs] for outputs in self.outputs]
        inputs = [[*r.leaves, *share.leaves] for r, share in zip(self.replicas, self.shares, strict=True)]
        # What was bound to the model before it was copied (a method kept as an attribute) uses the model's own weights:
        # their gradients are the strays.
        if _has_backward_threads(self.replicas[0].device):
            found, strays = self._in_one_call(arrived, inputs, keep)
        else:
            found, strays = self._in_threads(arrived, inputs, keep)

        count, device = len(self.weights), self.replicas[0].device
        totals = reduce([grads[:count] for grads in found], [replica.device for replica in self.replicas], device)
        totals = reduce([totals, *strays], [device] * (1 + len(strays)), device)
        return [*totals, *(gradient for grads in found for gradient in grads[count:])]

    def _in_threads(
        self, arrived: list[_Gradients], inputs: list[list[Tensor]], keep: bool
    ) -> tuple[list[_Gradients], ...]:
        calls = [
            partial(_backward, outputs, [*leaves, *self.weights], grads, keep)
            for outputs, leaves, grads in zip(self.outputs, inputs, arrived, strict=True)
        ]
        grads = self.threads.apply(calls, in_turn=self.in_turn)
        lengths = [len(leaves) for leaves in inputs]
        found = [each[:n] for each, n in zip(grads, lengths, strict=True)]
        return found, [each[n:] for each, n in zip(grads, lengths, strict=True)]

    def _in_one_call(
        self, arrived: list[_Gradients], inputs: list[list[Tensor]], keep: bool
    ) -> tuple[list[_Gradients], ...]:
        """From the thread that runs this, which is the first GPU's and can't wait for another's call."""
        leaves = [leaf for each in inputs for leaf in each]
        grads = _backward(list(chain(*self.outputs)), [*leaves, *self.weights], list(chain(*arrived)), keep)
        each_one = iter(grads)
        return [[next(each_one) for _ in each] for each in inputs], [grads[len(leaves) :]]


def _has_backward_threads(device: torch.device) -> bool:
    """torch's engine has a thread for each GPU. On the CPU a backward runs in the thread that calls it."""
    return device.type == "cuda"


def _backward(outputs: list[Tensor], inputs: list[Tensor], gradients: _Gradients, keep: bool) -> _Gradients:
    present = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    if not present:
        return [None] * len(inputs)
    outputs, arrived = map(list, zip(*present, strict=True))
    return list(torch.autograd.grad(outputs, inputs, arrived, retain_graph=keep, allow_unused=True))
