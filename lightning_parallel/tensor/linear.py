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
from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_parallel.ranks.shard import Shard
from lightning_parallel.tensor import functions
from lightning_parallel.tensor.layer import ParallelLayer, check_plain, shard_parameter
from lightning_parallel.tensor.region import ShardedRegion
from lightning_parallel.tensor.style import Site
from lightning_parallel.tensor.whole_input import copy_linear


class ParallelLinear(ParallelLayer):
    """Base of the divided linear layers: it holds a shard of the weight, and a shard or all of the bias.

    Attributes:
        in_features, out_features: the sizes of the whole layer.
        weight: ``[out, in]``, one of the two being this rank's piece; ``[in, out]`` if made from a ``Conv1D``.
        bias: ``[out]``, this rank's piece if the outputs are divided; or None.
        region: notified where the ranks begin, or cease, to compute different things; see ``tensor/region.py``.
        copy_input: sum the gradient of a whole input over the ranks.
        siblings: one object shared by all layers that get the same whole input; None for a layer that has none.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    _divided: Mapping[str, int]  # along which dimension parameters are, the weight being [out, in]

    def _hold(self, whole: nn.Module, site: Site, parts: tuple[int, ...] = ()) -> None:
        """Make this layer hold this rank's shard of ``whole``."""
        super().__init__()
        assert isinstance(whole.weight, nn.Parameter)
        self.group, self.shards = site.group, {}
        self._alone, self._transposed = site.group.size() == 1, _is_conv1d(whole)
        self.region = None if self._alone else site.region
        self.copy_input, self.siblings = not site.in_block and not self._alone, site.siblings
        self.out_features, self.in_features = whole.weight.shape[:: -1 if self._transposed else 1]
        for name in ("weight", "bias"):
            parameter = getattr(whole, name)
            if parameter is not None and name in self._divided:
                dim = self._divided[name] ^ (self._transposed and name == "weight")
                self.shards[name] = Shard.of(parameter.shape, dim, site.group, parts)
                parameter = shard_parameter(parameter, self.shards[name], site.shared)
            self.register_parameter(name, parameter)
        self.train(whole.training)

    def reset_parameters(self) -> None:
        """Draw this rank's shard of the weights that ``nn.Linear`` would draw from the same generator."""
        whole = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, self.weight.device, self.weight.dtype
        )
        with torch.no_grad():
            for name, own in self.named_parameters():
                drawn: Tensor = whole.get_parameter(name)
                drawn = drawn.t() if self._transposed and name == "weight" else drawn
                own.copy_(self.shards[name].take(drawn) if name in self.shards else drawn)

    def _outputs_here(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs, for an ``x`` that is whole."""
        if not self.copy_input or not x.requires_grad:
            return F.linear(x, weight, bias)
        if self.siblings is not None:
            return F.linear(self.siblings.copy(x, self.group, self), weight, bias)
        return F.linear(x, weight, bias) if x.is_meta else copy_linear(x, weight, bias, self.group)


class ColumnParallelLinear(ParallelLinear):
    """``nn.Linear`` with the outputs divided over the ranks.

    It takes the whole input ``[..., in_features]``, equal on all ranks, and returns this rank's outputs
    ``[..., out here]``. Weights start as the slices of ``nn.Linear``'s for the same seed, and the generator ends where
    it would after an ``nn.Linear``.

    Args:
        in_features: the number of inputs of the whole layer.
        out_features: the number of outputs of the whole layer.
        bias: add a bias, divided as the outputs are.
        group: the tensor group, over whose ranks the outputs are divided.
        gather_output: return ``[..., out_features]`` on all ranks. Only for a layer of one part.
        parts: the sizes of fused projections, such as q, k and v in one weight. Each is divided by itself. By default
            one.
        copy_input: sum the input's gradients over the ranks. False if the module that made the input already does.
        region: the region of different random numbers, entered after this layer when training; None for none.
        device: where the parameters are made; None for torch's default.
        dtype: the parameters' dtype; None for torch's default.

    Raises:
        ValueError: a rank would get no outputs, or several parts are to be gathered.
    """

    _divided = MappingProxyType({"weight": 0, "bias": 0})

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup,
        gather_output: bool = False,
        parts: tuple[int, ...] = (),
        copy_input: bool = True,
        region: ShardedRegion | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_gathered(gather_output, parts)
        self._hold(
            nn.Linear(in_features, out_features, bias, device, dtype), Site(group, region, not copy_input), parts
        )
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        group: dist.ProcessGroup,
        gather_output: bool = False,
        parts: tuple[int, ...] = (),
        copy_input: bool = True,
        region: ShardedRegion | None = None,
        shared: dict[int, nn.Parameter] | None = None,
    ) -> Self:
        """This rank's shard of an ``nn.Linear`` or a transformers ``Conv1D``, in the orientation that it has there.

        The arguments that aren't listed are those of the constructor.

        Args:
            linear: the layer. It stays as it is.
            shared: the shards made so far, by the id of the whole parameter, so that tied parameters stay tied. It is
                added to. Keep the layers that it was filled from as long as it is used, since ids are used again.

        Raises:
            ValueError: ``linear`` is something else, or more, than such a layer; or as the constructor.
        """
        return cls.at(Site(group, region, not copy_input, shared=shared), linear, parts, gather_output)

    @classmethod
    def at(cls, site: Site, linear: nn.Module, parts: tuple[int, ...], gather_output: bool) -> Self:
        """:meth:`from_linear`, with the layer's surroundings in one."""
        _check_divisible(linear)
        _check_gathered(gather_output, parts)
        self = cls.__new__(cls)
        self._hold(linear, site, parts)
        self.gather_output = gather_output
        return self

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]``, equal on all ranks -> ``[..., out here]``, or ``[..., out_features]`` if gathered."""
        weight = self.weight.t() if self._transposed else self.weight  # [out here, in]
        y = self._outputs_here(x, weight, self.bias)
        if self.gather_output:
            return functions.gather(y, -1, self.group, self.out_features)
        if self.region is not None and self.training:
            self.region.enter()
        return y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features} ({self.shards['weight'].size} here), "
            f"bias={self.bias is not None}, gather_output={self.gather_output}"
        )


class RowParallelLinear(ParallelLinear):
    """``nn.Linear`` with the inputs divided over the ranks.

    It takes this rank's piece of the input, ``[..., in here]``, and returns the whole output ``[..., out_features]``,
    equal on all ranks. The bias is whole on every rank, and is added once, to the sum. Weights start as in
    :class:`ColumnParallelLinear`.

    Args:
        in_features: the number of inputs of the whole layer.
        out_features: the number of outputs of the whole layer.
        bias: add a bias, which is whole on every rank.
        group: the tensor group, over whose ranks the inputs are divided.
        input_is_parallel: by default the input is this rank's piece. False: it is whole, ``[..., in_features]``, equal
            on all ranks, and is cut here.
        sequence_dim: return this rank's piece of the output along this dimension. The bias's gradient is then that of
            the piece, and has to be summed over the ranks.
        region: the region of different random numbers, left before this layer; None for none.
        device: where the parameters are made; None for torch's default.
        dtype: the parameters' dtype; None for torch's default.

    Raises:
        ValueError: a rank would get no inputs.
    """

    _divided = MappingProxyType({"weight": 1})

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
        region: ShardedRegion | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._hold(nn.Linear(in_features, out_features, bias, device, dtype), Site(group, region))
        self.input_is_parallel, self.sequence_dim = input_is_parallel, sequence_dim

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        group: dist.ProcessGroup,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
        region: ShardedRegion | None = None,
        shared: dict[int, nn.Parameter] | None = None,
    ) -> Self:
        """This rank's shard of an existing layer: see :meth:`ColumnParallelLinear.from_linear`."""
        self = cls.at(Site(group, region, shared=shared), linear, input_is_parallel)
        self.sequence_dim = sequence_dim
        return self

    @classmethod
    def at(cls, site: Site, linear: nn.Module, input_is_parallel: bool) -> Self:
        """:meth:`from_linear`, with the layer's surroundings in one."""
        _check_divisible(linear)
        self = cls.__new__(cls)
        self._hold(linear, site)
        self.input_is_parallel, self.sequence_dim = input_is_parallel, 1 if site.in_block else None
        return self

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in here]`` -> ``[..., out_features]``, equal on all ranks, or a piece along the sequence."""
        weight = self.weight.t() if self._transposed else self.weight  # [out, in here]
        if self._alone:
            return F.linear(x, weight, self.bias)
        if self.region is not None:
            self.region.leave()
        if not self.input_is_parallel:
            x = functions.split(x, -1, self.group)
        y = F.linear(x, weight)
        if self.sequence_dim is None:
            y = functions.reduce_(y, self.group)
        else:
            y = functions.reduce_scatter(y, self.sequence_dim, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # their dtypes differ under autocast

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features} ({self.shards['weight'].size} here), out_features={self.out_features}, "
            f"bias={self.bias is not None}, input_is_parallel={self.input_is_parallel}"
        )


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


def _check_gathered(gather_output: bool, parts: tuple[int, ...]) -> None:
    if gather_output and len(parts) > 1:
        raise ValueError(
            f"gather_output=True with parts={parts}: the joined outputs of the ranks wouldn't be in the order of the "
            f"parts. Use one layer for each part."
        )


def _is_falcon_s(linear: nn.Module) -> bool:
    """Is it transformers' Falcon layer, whose own forward computes what ``nn.Linear``'s does? For other classes a trial
    couldn't show that: they may clamp large values only, or change gradients only."""
    return type(linear).__name__ == "FalconLinear" and type(linear).__module__.startswith("transformers.")


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
    check_plain(linear, type(linear) if _is_falcon_s(linear) else nn.Linear, ["weight", "bias"], problem)
