"""Grouped-query attention with fewer key-value heads than ranks.

Where ranks have several heads each, key and value projections are divided like the queries'. Where there are fewer
heads than ranks, every rank needs one head, that of its queries::

    8 query heads, 2 key-value heads, 4 ranks      rank       0      1      2      3
                                                   queries   0 1    2 3    4 5    6 7
                                                   key-value  0      0      1      1

The projection stays whole on every rank, which computes its one head of it. Each rank then has a part of the
projection's gradients, to be summed over the ranks. Nothing else changes: names, checkpoints and norms are those of a
whole parameter. The number of ranks must be a multiple of the number of heads.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor, nn

from lightning_parallel.tensor.layer import check_plain
from lightning_parallel.tensor.linear import ParallelLinear
from lightning_parallel.tensor.style import Site


class SharedHeadsLinear(ParallelLinear):
    """An ``nn.Linear`` that is whole on every rank, and computes the one head that this rank needs.

    Args:
        linear: the layer. Its parameters are taken over, not copied.
        heads: the number of heads that the layer projects to.
        site: the layer's surroundings. The size of the group is a multiple of ``heads``.

    Raises:
        ValueError: ``linear`` is something else, or more, than such a layer.
    """

    _divided = MappingProxyType({})

    def __init__(self, linear: nn.Module, heads: int, site: Site) -> None:
        check_plain(
            linear, nn.Linear, ["weight", "bias"], None if isinstance(linear, nn.Linear) else "is not nn.Linear"
        )
        self._hold(linear, site)
        self._width = self.out_features // heads
        self._start = site.group.rank() * heads // site.group.size() * self._width

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]``, equal on all ranks -> ``[..., out_features / heads]``."""
        weight = self.weight.narrow(0, self._start, self._width)
        bias = None if self.bias is None else self.bias.narrow(0, self._start, self._width)
        y = self._outputs_here(x, weight, bias)
        if self.region is not None and self.training:
            self.region.enter()
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features} ({self._width} here)"
