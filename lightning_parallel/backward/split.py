"""The backward of one microbatch through a chunk, in two halves (zero-bubble schedules, arXiv:2401.10241).

The previous chunk waits for the gradient of what arrived, and for nothing else. A matmul's backward computes that one
and the gradient of its weight, at equal cost. The second may come later, where the stage would otherwise wait::

    first half, begin_backward()
        gradient --> matmul -------> norm -------> matmul ---> arrival
                     |   keeps       |             |   keeps
                     |   x, dy       weight.grad   |   x, dy
                     :                             :
    second half, WeightGradients.run()
                     dW = dy^T x                   dW = dy^T x
                     |                             |
                     transpose, cast, ...          transpose, cast, ...
                     |                             |
                     weight.grad                   weight.grad

The first half is one ordinary backward that frees as it goes, but stops short of the weights that can wait. Of their
matmuls it keeps what the weights' gradients are computed from. The second half computes each, and starts a backward at
the weight's own edge of the graph: casts, weight norm, ties and hooks on parameters are left to autograd.

What isn't known here belongs to the first half: then less is left for later, and the numbers are the same. That goes
for norms, embeddings and biases, functions of users and of torch.compile, and for layers that run again in the backward
(``recompute.py``, or a user's own activation checkpointing).

A parameter's gradient comes whole in one half. Whoever averages it is called once, when it is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_parallel.backward.matmuls import KNOWN, Formula
from lightning_parallel.private.torch.autograd import hooks_beside, memory_is_shared, run_backward, saved_tensor
from lightning_parallel.private.torch.tensors import version_of

# When more bytes of weights' gradients wait, one backward adds them all: to begin one takes as long as a small matmul.
AT_A_TIME = 1 << 24


def begin_backward(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> WeightGradients:
    """Run the first half of a backward.

    Args:
        edges: the edges of the graph at which it begins.
        gradients: the gradient for each of these edges.
        inputs: the leaves whose gradients are needed now. If the graph reaches none of them, the backward runs whole.

    Returns:
        The second half. It is empty where no weight can wait.
    """
    leaves = [get_gradient_edge(x).node for x in inputs if x.requires_grad]
    now, late = _Graph([edge.node for edge in edges], leaves).divide()
    if not late:
        if edges:
            run_backward(edges, gradients)
        return WeightGradients(late)
    shared: list[Tensor] = []

    def keep_apart(given: tuple[Tensor | None, ...]) -> None:
        """Keep another reference to gradients whose memory is shared. A leaf without a gradient takes over the memory
        of the first one that comes, if nobody else refers to that tensor. Autograd doesn't see that a kept ``dy`` is a
        view of it, to which the next gradient would be added. The reference makes the leaf take a copy."""
        shared.extend(g for g in given if g is not None and memory_is_shared(g))

    assert now, "without a leaf to reach now, nothing would wait"
    # A leaf that has a gradient adds to it, and takes over no memory.
    first = [node for node in now if getattr(getattr(node, "variable", None), "grad", None) is None]
    handles = [node.register_prehook(keep_apart) for node in first]
    try:
        run_backward(edges, gradients, [GradientEdge(node, 0) for node in now])
    finally:
        for handle in handles:
            handle.remove()
        for use in chain(*late):
            use.stop()
    return WeightGradients(late)


class WeightGradients:
    """The second half of a backward. Until it runs, the tensors that it needs are held.

    Args:
        parts: the parts of the graph that wait, each by its uses of weights: the way from one or more matmuls to one
            parameter, or to several that meet on it, such as direction and magnitude of a weight norm.
    """

    def __init__(self, parts: Sequence[list[_Use]]) -> None:
        self._parts = deque[list[_Use]]()
        for uses in parts:
            if reached := [use for use in uses if use.dy is not None]:
                self._parts.append(reached)

    @torch.no_grad()
    def run(self) -> None:
        """Compute the gradients that wait, one after the other, and free what was held for each.

        Raises:
            RuntimeError: an activation or its gradient was changed in place since the first half.
        """
        sums: dict[GradientEdge, Tensor] = {}
        nbytes = 0
        while self._parts:
            uses = self._parts.popleft()
            while uses:
                use = uses.pop(0)
                edge, gradient = use.edge, use.gradient()
                nbytes += gradient.nbytes
                # A weight's node may be shared by several matmuls.
                sums[edge] = sums[edge].add_(gradient) if edge in sums else gradient
                del use, gradient
            # One backward for all uses of a parameter, so its hooks see their sum, once.
            if nbytes > AT_A_TIME or not self._parts:
                run_backward([*sums], [*sums.values()])
                sums, nbytes = {}, 0


@dataclass(eq=False)
class _Use:
    """A matmul whose weight's gradient waits.

    Attributes:
        edge: the edge from the matmul to the weight, or to the operation that made the weight.
        x: the other operand.
        formula: computes the weight's gradient from ``x`` and ``dy``.
        handle: removes the hook on the matmul.
        dy: the gradient of the product, from the first half.
        versions: the versions of ``x`` and ``dy`` at that time, which count in-place changes.
    """

    edge: GradientEdge
    x: Tensor
    formula: Formula
    handle: RemovableHandle | None = None
    dy: Tensor | None = None
    versions: tuple[int, int] = (0, 0)

    def listen(self, node: Node) -> bool:
        """Put a hook on the matmul's node. Returns whether there is no other hook on it."""
        self.handle = node.register_hook(self.keep)
        return not hooks_beside(self.handle)

    def keep(self, _: Any, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the gradient of the product: the tensor itself and no alias, so that others can see that it is in
        use."""
        (self.dy,) = gradients
        if self.dy is not None:
            self.versions = version_of(self.x), version_of(self.dy)

    def stop(self) -> None:
        if self.handle is not None:
            self.handle.remove()

    def gradient(self) -> Tensor:
        assert self.dy is not None
        if (version_of(self.x), version_of(self.dy)) != self.versions:
            raise RuntimeError(
                f"A tensor of shape {[*self.x.shape]} that a weight's gradient is computed from, or the gradient of its"
                " product, was changed in place between the two halves of a backward. Change a clone of it, or choose"
                " a schedule that does not split the backward."
            )
        return self.formula(self.x, self.dy)


class _Graph:
    """The graph of a backward that begins at ``roots``, where the gradients of ``inputs`` are needed now."""

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Node]) -> None:
        nodes = [*dict.fromkeys(roots)]
        parents: dict[Node, list[Node]] = {node: [] for node in nodes}
        children: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        for node in nodes:  # it grows, as the lists of the other loops do
            children[node] = below = node.next_functions
            for child, _ in below:
                if child is None:
                    continue
                above = parents.get(child)
                if above is None:
                    parents[child] = [node]
                    nodes.append(child)
                else:
                    above.append(node)
        path = [node for node in dict.fromkeys(inputs) if node in parents]
        self._inputs, on_path = [*path], {*path}
        for node in path:
            for parent in parents[node]:
                if parent not in on_path:
                    on_path.add(parent)
                    path.append(parent)
        self._roots, self._parents, self._children = {*roots}, parents, children
        self._path = on_path  # the nodes that a gradient passes on its way to an input

    def divide(self) -> tuple[list[Node], list[list[_Use]]]:
        """The leaves that the first half computes, and the parts that wait, with the matmuls that keep what they
        need."""
        if any("Checkpoint" in kind.__name__ for kind in {*map(type, self._children)}):
            return [], []  # a reentrant checkpoint refuses a backward that is told where to stop
        now = [*self._inputs]
        late: list[list[_Use]] = []
        seen = {*self._path}
        for start in self._children:
            if start not in seen:
                region = self._region(start, seen)
                uses = self._uses(region)
                if uses:
                    late.append(uses)
                else:
                    now += [node for node in region if not any(child for child, _ in self._children[node])]
        return now, late

    def _region(self, start: Node, seen: set[Node]) -> list[Node]:
        """The nodes off the path that are connected with each other. All of them wait, or none."""
        region = [start]
        seen.add(start)
        for node in region:
            for child, _ in self._children[node]:
                if child is not None and child not in seen:
                    seen.add(child)
                    region.append(child)
            for parent in self._parents[node]:
                if parent not in seen:
                    seen.add(parent)
                    region.append(parent)
        return region

    def _uses(self, region: list[Node]) -> list[_Use]:
        """The matmuls through which gradients enter a region; none if gradients may enter it in another way."""
        if not self._roots.isdisjoint(region):
            return []
        uses: list[_Use] = []
        for node in region:
            for parent in dict.fromkeys(self._parents[node]):
                for operand, (child, number) in enumerate(self._children[parent] if parent in self._path else ()):
                    if child is node:
                        use = self._use(parent, operand, node, number)
                        if use is None:
                            for other in uses:
                                other.stop()
                            return []
                        uses.append(use)
        return uses

    def _use(self, node: Node, operand: int, weight: Node, number: int) -> _Use | None:
        """One operand of a node, output ``number`` of the node ``weight``, as a weight that can wait; None if that
        isn't known."""
        find = KNOWN.get(type(node).__name__)
        found = find(node, operand) if find else None
        # Older versions of torch free the nodes of Python functions with the graph, also where an edge refers to them.
        if found is None or isinstance(weight, FunctionCtx):
            return None
        other, name, formula = found
        if self._children[node][other][0] not in self._path:
            return None  # then what would be held is no activation
        x = saved_tensor(node, name)
        if type(x) is not Tensor or x.layout is not torch.strided:
            return None
        use = _Use(GradientEdge(weight, number), x.detach(), formula)
        if not use.listen(node):  # another hook is to see the weight's gradient, and may change it
            use.stop()
            return None
        return use
