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

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.tensor.copy_linear import copy_linear
from lightning_parallel.tensor.layer import ParallelLayer, check_plain
from lightning_parallel.tensor.region import ShardedRegion
from lightning_parallel.tensor.siblings import Siblings


class SharedHeadsLinear(ParallelLayer):
    """An ``nn.Linear`` that is whole on every rank, and computes the one head that this rank needs.

    Args:
        linear: the layer. Its parameters are taken over, not copied.
        heads: the number of heads that the layer projects to.
        group: the tensor group. Its size is a multiple of ``heads``.
        copy_input: sum the input's gradients over the ranks. False if the module that made the input already does.
        region: entered after this layer when training.
        siblings: one object shared by all layers that get the same input.

    Raises:
        ValueError: ``linear`` is something else, or more, than such a layer.
    """

    weight: Tensor
    bias: Tensor | None
    _uncopied = ("group", "region")

    def __init__(
        self,
        linear: nn.Module,
        heads: int,
        *,
        group: dist.ProcessGroup,
        copy_input: bool = True,
        region: ShardedRegion | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        super().__init__()
        problem = None if isinstance(linear, nn.Linear) else "is not nn.Linear"
        check_plain(linear, nn.Linear, ["weight", "bias"], problem)
        assert isinstance(linear, nn.Linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.group, self.region, self.shards = group, region, {}
        self.copy_input, self._siblings = copy_input, siblings
        self._width = linear.out_features // heads
        self._start = group.rank() * heads // group.size() * self._width
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]``, equal on all ranks -> ``[..., out_features / heads]``."""
        weight = self.weight.narrow(0, self._start, self._width)
        bias = None if self.bias is None else self.bias.narrow(0, self._start, self._width)
        if self.copy_input and x.requires_grad and self._siblings is not None:
            y = F.linear(self._siblings.copy(x, self.group, self), weight, bias)
        elif self.copy_input and x.requires_grad and not x.is_meta:
            y = copy_linear(x, weight, bias, self.group)
        else:
            y = F.linear(x, weight, bias)
        if self.region is not None and self.training:
            self.region.enter()
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features} ({self._width} here)"
