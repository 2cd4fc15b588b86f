"""Tensors that live on another stage: their shape is known here, their values are not.

The user's ``training_step`` runs on every stage, so it meets layers whose parameters are elsewhere. Such a parameter,
and whatever an absent layer would have computed, is an :class:`AbsentTensor`. Shape, dtype and device are right, so
masks, position ids and reshapes work. Values don't exist: every operation on it is done on the meta device, without
memory and without arithmetic. What depends on an absent tensor is absent too::

    hidden = embed(ids)                       absent on stage 1, with the origin "the output of 'embed'"
    mask = torch.ones_like(hidden)[..., 0]    depends on the shape alone: an ordinary tensor
    noise = torch.randn_like(hidden)          drawn, as on stage 0: an ordinary tensor
    penalty = hidden.pow(2).mean()            absent, with the same origin

So a value that another stage has, and that no message brings, never turns into a silent zero. It reaches this stage's
output or the loss as an absent tensor, which names its origin. An operation that draws random numbers draws them for an
absent tensor too, so that the generators of all stages stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_parallel.absent.on_meta import Argument, computed_on_meta
from lightning_parallel.private.torch.tensors import (
    PACK_SEQUENCES,
    PAD_SEQUENCES,
    dispatch_disabled,
    drawing_for_nothing,
    flat_arguments,
    make_parameter,
    subclass_functions_disabled,
    tree_leaves,
    tree_map,
    tree_unflatten,
    wrapper_tensor,
    written_arguments,
)
from lightning_parallel.values import PLAIN

_ADVICE = (
    "In a callback, or a hook outside of the steps, compute it in validation_step or predict_step instead. In a step, "
    "use it in the first batch too: only what that uses of other stages' layers is sent."
)


class AbsentValueError(RuntimeError):
    """Code needs the values of a tensor that another stage holds.

    Attributes:
        origins: what the tensor was computed from, in words for an error.
    """

    def __init__(self, message: str, origins: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.origins = origins


class TakesGradientsError(AbsentValueError):
    """Code calls torch.autograd.grad, or backward, on absent tensors."""

    def __init__(self) -> None:
        super().__init__(
            "The step calls torch.autograd.grad or backward on what several pipeline stages compute, but no stage has "
            "the graph of the others. Use a strategy without stages, such as 'ddp' or 'fully_sharded'."
        )


@dataclass(slots=True, eq=False)
class AbsentMemory:
    """The memory that an absent tensor and its views would share: a write to one of them changes all.

    Attributes:
        origins: what the tensor was computed from, in words that an error can show: "the output of 'blocks.1'".
        copy_of: the memory of the input of which this is a copy, while a module runs on copies (``answers.py``).
        listeners: functions that are called after each write, with whether it is one that changes nothing when it is
            made again, such as a clamp.
    """

    origins: frozenset[str]
    copy_of: AbsentMemory | None = None
    listeners: tuple[Callable[[bool], None], ...] = ()

    def write(self, origins: frozenset[str], *, settles: bool = False) -> None:
        self.origins = origins
        for listener in self.listeners:
            listener(settles)


class AbsentTensor(Tensor):
    """A tensor without values.

    Args:
        like: the tensor that gives shape, strides and dtype.
        memory: a memory of its own, or that of the tensor that it is a view of.
        requires_grad: whether gradients flow to it, as for any tensor. By default False.
    """

    memory: AbsentMemory

    @staticmethod
    def __new__(
        cls, like: Tensor, device: torch.device, memory: AbsentMemory, requires_grad: bool = False
    ) -> AbsentTensor:
        self = wrapper_tensor(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device, requires_grad=requires_grad
        )
        self.memory = memory
        return self

    @property
    def origins(self) -> frozenset[str]:
        """What the tensor was computed from."""
        return self.memory.origins

    @property
    def origin(self) -> str:
        """One of the origins, for errors."""
        return min(self.origins)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentTensor({self.origin}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return self._refuse("format") if spec else repr(self)

    def numpy(self, *, force: bool = False) -> Any:
        return self._refuse("numpy")

    def tolist(self) -> Any:
        return self._refuse("tolist")

    def data_ptr(self) -> int:
        return self._refuse("data_ptr")  # a Triton kernel would read from address 0

    def _refuse(self, name: str) -> NoReturn:
        raise AbsentValueError(
            f"{name} failed on {self.origin}, which lives on another pipeline stage: its shape is known here, its "
            f"values are not. {_ADVICE}",
            self.origins,
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.origin} lives on another pipeline stage, so it can't be saved or logged here. To log a "
            f"parameter, read it in training_step, too: then the last stage holds it. To save the whole model, call "
            f"trainer.save_checkpoint(path) on all ranks; lightning_parallel.checkpoint.read_full(path) reads it."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        copy = AbsentTensor(self, self.device, AbsentMemory(self.origins), self.requires_grad)
        if isinstance(self, nn.Parameter):
            make_parameter(copy)
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.autograd.grad, Tensor.backward):
            raise TakesGradientsError
        if func == PAD_SEQUENCES and isinstance(args[1], AbsentTensor):  # torch would say that its data isn't allocated
            raise AbsentValueError(
                f"pad_packed_sequence needs the lengths, which are in {args[1].origin} on another pipeline stage. Call "
                f"pack_padded_sequence, the layer and pad_packed_sequence inside one module of your own.",
                args[1].origins,
            )
        # Tensor's own would make every result an AbsentTensor, also those that have values.
        with subclass_functions_disabled():
            output = func(*args, **(kwargs or {}))
        if func == _SET_DATA and isinstance(args[0], AbsentTensor):  # nothing is dispatched
            given = args[1].memory if isinstance(args[1], AbsentTensor) else AbsentMemory(frozenset())
            if given is not args[0].memory:  # module.to(dtype) gives a parameter its own data again
                args[0].memory.write(given.origins)
        return output

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _INDEX:
            args = args[0], [*chain.from_iterable(map(_places, args[1]))]
        is_foreach, is_view, reshapes_in_place, may_draw = _kind_of(func)
        if is_foreach and len(args[0]) > 1:
            return _one_by_one(func, args, kwargs)
        flat, spec = flat_arguments(args, kwargs)
        absent = [x for x in flat if isinstance(x, AbsentTensor)]
        origins = absent[0].origins.union(*(x.origins for x in absent[1:]))
        written = tree_leaves([*written_arguments(func, args, kwargs)])
        if func.namespace == "c10d":  # a collective, whose schema doesn't say what it writes to; nobody is met in it
            written = flat
        if any(isinstance(x, Tensor) and not isinstance(x, AbsentTensor) for x in written):
            # present[mask] = absent: the tensor would then look like a value that it isn't.
            where = f"{absent[0].origin}, which lives on another pipeline stage, into a tensor of this one."
            raise AbsentValueError(f"{func} writes {where}", origins)
        if reshapes_in_place:  # x.unsqueeze_(0) changes only what a tensor says of its shape
            with dispatch_disabled():
                return func(*args, **kwargs)

        if may_draw and not drawing_for_nothing(func, args, kwargs):
            drawn = func(*tree_map(_stand_in_for, args), **tree_map(_stand_in_for, kwargs))
            if func.overloadpacket in _DRAWN_BY_SHAPE:
                return drawn

        device = absent[0].device
        if func is PACK_SEQUENCES and not isinstance(args[1], AbsentTensor):
            data, sizes = func(_stand_in_for(args[0]), *args[1:])  # the lengths, of the batch, say how many there are
            return AbsentTensor(data.to("meta"), device, AbsentMemory(origins)), sizes
        if "device" in kwargs:  # x.to("cuda"): the result is said to be there, and still has no values
            device = torch.device(kwargs["device"] or device)
            flat, spec = flat_arguments(args, kwargs | {"device": torch.device("meta")})
        # What is like a parameter is an optimizer's state: it stays absent, and takes no memory.
        if func in _FILLED and not isinstance(args[0], nn.Parameter):
            return torch.full_like(computed_on_meta(func, flat, spec)[0][0], _FILLED[func](*args), device=device)
        try:
            out, out_spec = computed_on_meta(func, flat, spec)
        except (RuntimeError, NotImplementedError) as error:
            raise AbsentValueError(
                f"{func} failed on {absent[0].origin}, which lives on another pipeline stage: its shape is known here, "
                f"its values are not ({error}). {_ADVICE}",
                origins,
            ) from error

        def wrap(value: Any) -> Any:
            if isinstance(value, Argument):  # in place: the same object
                same = flat[value.index]
                if isinstance(same, AbsentTensor):
                    same.memory.write(origins, settles=func.overloadpacket in _SETTLE)
                return same
            memory = absent[0].memory if is_view else AbsentMemory(origins)
            return AbsentTensor(value, device, memory) if isinstance(value, Tensor) else value

        if func.namespace == "c10d" or (len(out) == 1 and out[0] is None):  # torch._foreach_lerp_ returns nothing
            for each in written:
                if isinstance(each, AbsentTensor):
                    each.memory.write(origins)
        return tree_unflatten([wrap(value) for value in out], out_spec)


@cache  # to ask the operator itself takes as long as all else
def _kind_of(func: Any) -> tuple[bool, bool, bool, bool]:
    """Does an operator work on lists? Does it return a view, reshape in place, perhaps draw random numbers?"""
    is_foreach = func.overloadpacket.__name__.startswith("_foreach")
    reshapes, draws = torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded
    return is_foreach, func.is_view, reshapes in func.tags, draws in func.tags


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Do an operation on lists for each place of the lists: some have present tensors, and others absent ones."""
    count = len(args[0])
    found: list[Any] = []
    for place in range(count):
        at = [[x[place]] if isinstance(x, (list, tuple)) and len(x) == count else x for x in args]
        found += func(*at, **kwargs) or ()
    return found or None


_INDEX = torch.ops.aten.index.Tensor  # what x[...] runs


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """What stands for an index in ``x[...]``: for a mask with values the positions where it is True, whose number is
    known then. A mask without dimensions adds one to ``x``."""
    if index is None or isinstance(index, AbsentTensor) or index.dtype is not torch.bool or index.dim() == 0:
        return [index]
    return index.nonzero(as_tuple=True)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

# Operations that only read the shape of their input, each with the value that fills the result.
_FILLED: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.zeros_like.default: lambda like: 0,
    torch.ops.aten.ones_like.default: lambda like: 1,
    torch.ops.aten.full_like.default: lambda like, value: value,
    torch.ops.aten.new_zeros.default: lambda like, size: 0,
    torch.ops.aten.new_ones.default: lambda like, size: 1,
    torch.ops.aten.new_full.default: lambda like, size, value: value,
}


# Operations in place that change nothing when they are done again.
_SETTLE = (torch.ops.aten.clamp_, torch.ops.aten.clamp_min_, torch.ops.aten.clamp_max_, torch.ops.aten.nan_to_num_)

# Operations that only read the shape of their input, and draw what fills the result.
_DRAWN_BY_SHAPE = (torch.ops.aten.rand_like, torch.ops.aten.randn_like, torch.ops.aten.randint_like)


def _stand_in_for(value: Any) -> Any:
    """An ordinary tensor of ones in the place of an absent one. Ones are valid as probabilities, weights and standard
    deviations alike, and how many numbers an operation draws depends on shapes only."""
    if isinstance(value, AbsentTensor):
        return torch.ones(value.shape, dtype=value.dtype, device=value.device)
    return value


def absent_like(tensor: Tensor, origin: str, device: torch.device | None = None) -> AbsentTensor:
    """A tensor like ``tensor`` without its values. A parameter stays one, trainable or frozen as it was.

    Args:
        tensor: the tensor that gives shape, strides and dtype.
        origin: what the new tensor is, in words for an error.
        device: the device that it reports; by default the tensor's.
    """
    copy_of = tensor.memory if isinstance(tensor, AbsentTensor) else None
    absent = AbsentTensor(tensor, device or tensor.device, AbsentMemory(frozenset([origin]), copy_of))
    if isinstance(tensor, nn.Parameter):
        absent.requires_grad_(tensor.requires_grad)
        make_parameter(absent)
    return absent


def first_absent(value: Any) -> AbsentTensor | None:
    """The first absent tensor in a nested structure, or None."""
    if isinstance(value, Tensor):
        return value if isinstance(value, AbsentTensor) else None
    if isinstance(value, PLAIN):
        return None
    if type(value) in (tuple, list, dict):  # torch's walk is slow, and every layer's input is looked at
        for inside in value.values() if type(value) is dict else value:
            if (found := first_absent(inside)) is not None:
                return found
        return None
    return next((x for x in tree_leaves(value) if isinstance(x, AbsentTensor)), None)
