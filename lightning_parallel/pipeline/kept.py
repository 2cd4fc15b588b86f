"""What a chunk of a stage keeps for a later chunk of the same stage, instead of sending it around (``cuts/flow.py``).

In a V the first chunk and the last one share a stage, so a skip connection from the first layers to the last ones is no
message::

    stage 1   chunk 0  -- kept --> chunk 3        B of chunk 3  -- gradient --> B of chunk 0
    stage 0   chunk 1  ----------> chunk 2

A kept tensor joins what arrives from the previous chunk, and its gradient joins those with which the backward begins.
Forwards of a microbatch run in the order of the chunks, and backwards in the reverse order, so nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_parallel.cuts.flow import tensors_of
from lightning_parallel.messages.ends import Ends, Kept
from lightning_parallel.messages.message import Format
from lightning_parallel.pipeline.stage import Stage


class KeptOnStage:
    """The ends of what a chunk keeps, and of what earlier chunks of its stage keep for it.

    Args:
        index: the chunk.
    """

    def __init__(self, index: int, stage: Stage, ends: Ends) -> None:
        self._index, self._stage, self._ends = index, stage, ends
        # By microbatch in flight: where gradients come back, and the formats of what has been taken.
        self._edges: deque[list[tuple[Kept, list[GradientEdge]]]] = deque()
        self._taken: deque[list[tuple[Kept, Format]]] = deque()

    # -- forward -------------------------------------------------------------------------------------------------

    def joined(self, tensors: list[Tensor], format: Format, *, trains: bool) -> tuple[list[Tensor], Format]:
        """What has arrived from the previous chunk, and after it what earlier chunks of this stage have kept.

        Args:
            trains: a backward will follow.
        """
        taken: list[tuple[Kept, Format]] = []
        for chunk in self._stage.cuts[self._index].into:
            if chunk != self._index - 1:
                source = self._ends.earlier[chunk]
                more, its_format = source.activations.take()
                tensors, format = [*tensors, *more], (*format, *its_format)
                taken.append((source, its_format))
        if trains:
            self._taken.append(taken)
        return tensors, format

    def keep(self, output: list[Tensor], *, trains: bool) -> list[Tensor]:
        """Keep what later chunks of this stage need of what departs. Returns the rest, for the next chunk."""
        edges: list[tuple[Kept, list[GradientEdge]]] = []
        for chunk, cargo in reversed(self._stage.cuts[self._index].out_of.items()):
            if chunk != self._index + 1:
                count = len(output) - tensors_of(cargo)
                output, part = output[:count], output[count:]
                self._ends.later[chunk].activations.send(part, 0)
                edges.append((self._ends.later[chunk], edges_of(part)))
        if trains:
            self._edges.append(edges)
        return output

    # -- backward ------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the backward of the oldest microbatch begins with gradients of later chunks, and these."""
        edges, gradients = list[GradientEdge](), list[Tensor]()
        for kept, own in self._edges.popleft():
            if own:
                those, found = present(own, *kept.gradients.take())
                edges, gradients = edges + those, gradients + found
        return edges, gradients

    def give_back(self, gradients: list[Tensor], format: Format) -> tuple[list[Tensor], Format]:
        """Give earlier chunks the gradients of what they have kept for the oldest microbatch.

        Args:
            gradients: those of all that had arrived for it of which a gradient is wanted, in this format.

        Returns:
            The rest, for the previous chunk, and the format of what it had sent.
        """
        for kept, its_format in reversed(self._taken.popleft()):
            format = format[: len(format) - len(its_format)]
            wanted = sum(each.requires_grad for each in format)
            if own := gradients[wanted:]:
                kept.gradients.send(own, 0)
            gradients = gradients[:wanted]
        return gradients, format


def edges_of(tensors: Sequence[Tensor]) -> list[GradientEdge]:
    """Where a backward begins that is given these tensors' gradients."""
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


def present(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], format: Format
) -> tuple[list[GradientEdge], list[Tensor]]:
    """The edges whose gradients have come, and these. Where :data:`.NO_GRADIENT` came, which alone requires one, no
    backward begins: from zeros, parameters would get zeros that have None in one process."""
    pairs = [each for each in zip(edges, gradients, format, strict=True) if not each[2].requires_grad]
    return [edge for edge, _, _ in pairs], [gradient for _, gradient, _ in pairs]
