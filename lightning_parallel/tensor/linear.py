"""Linear layers divided over the ranks of a tensor group (Megatron-LM, Shoeybi et al. 2019, section 3).

A column-wise layer holds some of the outputs, a row-wise one some of the inputs. A pair of them with an elementwise
function between (an MLP; or attention, whose pieces are heads) needs one message in each direction::

    ColumnParallelLinear   y_i = x W_i^T + b_i            x whole, y_i a piece    backward: dx summed over the ranks
    RowParallelLinear      y = sum_i x_i W_i^T + b        x_i a piece, y whole    backward: nothing to send

"Column" and "row" refer to the matrix A in y = x A, which is the transpose of ``nn.Linear``'s weight ``[out, in]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_parallel.tensor import functions
from lightning_parallel.tensor.layer import ParallelLayer, Site, check_plain


class ParallelLinear(ParallelLayer, nn.Linear):
    """Base of the divided linear layers: it holds a shard of the weight, and a shard or all of the bias. It is an
    ``nn.Linear`` for code that asks what a layer is, such as to decay its weights.

    Attributes:
        in_features, out_features: the sizes of the whole layer.
        weight: ``[out, in]``, one of the two being this rank's piece; ``[in, out]`` if made from a ``Conv1D``.
        bias: ``[out]``, this rank's piece if the outputs are divided; or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]  # torch's declaration leaves out None
    _divided: Mapping[str, int]  # along which dimension parameters are, the weight being [out, in]

    def __init__(self, whole: Any, site: Site | dist.ProcessGroup, parts: tuple[int, ...] = ()) -> None:
        _check_divisible(whole)
        super().__init__(whole, site)
        self._transposed = _is_conv1d(whole)
        self.out_features, self.in_features = whole.weight.shape[:: -1 if self._transposed else 1]
        for name in ("weight", "bias"):
            parameter = getattr(whole, name)
            if parameter is not None and name in self._divided:
                dim = self._divided[name] ^ (self._transposed and name == "weight")
                self.hold_shard(name, parameter, dim, parts)
            else:
                self.register_parameter(name, parameter)


class ColumnParallelLinear(ParallelLinear):
    """``nn.Linear`` with the outputs divided over the ranks.

    It takes the whole input ``[..., in_features]``, equal on all ranks, and returns this rank's outputs
    ``[..., out here]``.

    Args:
        whole: an ``nn.Linear``, or a transformers ``Conv1D``, whose orientation is kept.
        site: the tensor group, over whose ranks the outputs are divided; or what is around the layer.
        parts: the sizes of fused projections, such as q, k and v in one weight. Each is divided by itself.
        gather_output: return ``[..., out_features]`` on all ranks. Only for a layer of one part.

    Raises:
        ValueError: ``whole`` is something else, or more, than such a layer; a rank would get no outputs; or several
            parts are to be gathered.
    """

    _divided = MappingProxyType({"weight": 0, "bias": 0})

    def __init__(
        self, whole: Any, site: Site | dist.ProcessGroup, parts: tuple[int, ...] = (), gather_output: bool = False
    ) -> None:
        if gather_output and len(parts) > 1:
            raise ValueError(
                f"gather_output=True with parts={parts}: the joined outputs of the ranks wouldn't be in the order of "
                f"the parts. Use one layer for each part."
            )
        super().__init__(whole, site, parts)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]``, equal on all ranks -> ``[..., out here]``, or ``[..., out_features]`` if gathered."""
        weight, site = self.weight.t() if self._transposed else self.weight, self.site  # [out here, in]
        if site.siblings is None and not site.in_block:
            y = copy_linear(x, weight, self.bias, site.group)
        else:
            y = F.linear(site.copied(x, self), weight, self.bias)
        if self.gather_output:
            return functions.gather(y, -1, site.group, self.out_features)
        site.enter_region(self.training)
        return y


class RowParallelLinear(ParallelLinear):
    """``nn.Linear`` with the inputs divided over the ranks.

    It takes this rank's piece of the input, ``[..., in here]``, and returns the whole output ``[..., out_features]``,
    equal on all ranks. The bias is whole on every rank, and is added once, to the sum.

    Args:
        whole: an ``nn.Linear``, or a transformers ``Conv1D``, whose orientation is kept.
        site: the tensor group, over whose ranks the inputs are divided; or what is around the layer.
        input_is_parallel: the input is this rank's piece. If False, it is whole, ``[..., in_features]``, equal on all
            ranks, and is cut here.

    Raises:
        ValueError: ``whole`` is something else, or more, than such a layer; or a rank would get no inputs.
    """

    _divided = MappingProxyType({"weight": 1})

    def __init__(self, whole: Any, site: Site | dist.ProcessGroup, input_is_parallel: bool = True) -> None:
        super().__init__(whole, site)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in here]`` -> ``[..., out_features]``, equal on all ranks. In a block that works on pieces of the
        sequence: this rank's piece of that, along dimension 1."""
        weight, group = self.weight.t() if self._transposed else self.weight, self.site.group  # [out, in here]
        if group.size() == 1:
            return F.linear(x, weight, self.bias)
        self.site.leave_region()
        if not self.input_is_parallel:
            x = functions.split(x, -1, group)
        y = F.linear(x, weight)
        y = functions.reduce_scatter(y, 1, group) if self.site.in_block else functions.reduce_(y, group)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # their dtypes differ under autocast


# -- the gradient of an input ------------------------------------------------------------------------------------


def copy_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """``F.linear(copy(x, group), weight, bias)``, whose backward sends the input's gradient while it computes the
    weight's. ``x`` ``[..., in]`` is equal on all ranks, ``weight`` is ``[out here, in]``::

        backward     dx = g W     all-reduce of dx ........................ wait
                                  dW = g^T x     db = sum of g's rows
    """
    if group.size() == 1 or x.is_meta or not x.requires_grad:
        return F.linear(x, weight, bias)
    given, device = [x, weight, bias], x.device.type
    if torch.is_autocast_enabled(device):  # which doesn't act on a custom autograd function: cast as for F.linear
        dtype = torch.get_autocast_dtype(device)
        given = [
            t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype) for t in given
        ]
    return _CopyLinear.apply(*given, group)  # type: ignore[no-any-return, no-untyped-call]


class _CopyLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.linear(x, weight, bias).data  # no view, which autograd would let nobody change in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        if torch.is_grad_enabled():  # once_differentiable would refuse only where ``g`` itself has a gradient
            raise RuntimeError("ColumnParallelLinear has no second derivative: leave out create_graph=True.")
        x, weight = ctx.saved_tensors
        shape = g.shape
        g = g.reshape(-1, shape[-1])
        grad_x = g @ weight
        work = dist.all_reduce(grad_x, group=ctx.group, async_op=True) if functions.sends(grad_x, ctx.group) else None
        grad_weight = grad_bias = None
        if x is not None:
            x = x.reshape(-1, x.shape[-1])
            # In the weight's own memory layout, so the gradient is accumulated without a copy.
            grad_weight = g.t() @ x if weight.is_contiguous() else (x.t() @ g).t()
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(0)
        if work is not None:
            work.wait()
        return grad_x.view(*shape[:-1], weight.shape[1]), grad_weight, grad_bias, None


# -- what can be divided -----------------------------------------------------------------------------------------


def is_linear(layer: nn.Module) -> bool:
    """Is it an ``nn.Linear``, or transformers' ``Conv1D``, the same with a transposed weight?"""
    return isinstance(layer, nn.Linear) or _is_conv1d(layer)


def is_divisible(layer: nn.Module) -> bool:
    """Can a linear layer be divided without losing anything of it?"""
    try:
        _check_divisible(layer)
    except ValueError:
        return False
    return True


def _is_conv1d(layer: nn.Module) -> bool:
    """Is it transformers' linear layer with a weight ``[in, out]``? It is recognised without importing transformers."""
    return (
        type(layer).__name__ == "Conv1D"
        and isinstance(layer.weight, Tensor)
        and layer.weight.shape == (getattr(layer, "nx", None), getattr(layer, "nf", None))
    )


def _check_divisible(linear: nn.Module) -> None:
    problem = None
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        problem = "belongs to nn.MultiheadAttention, which uses the weight without calling the layer"
    elif not is_linear(linear):
        problem = "is not nn.Linear, nor transformers' Conv1D"
    # Falcon's layer computes in a forward of its own what nn.Linear does. For other classes a trial couldn't show that:
    # they may clamp large values only, or change gradients only.
    is_falcon_s = type(linear).__name__ == "FalconLinear" and type(linear).__module__.startswith("transformers.")
    check_plain(linear, type(linear) if is_falcon_s else nn.Linear, ["weight", "bias"], problem)
