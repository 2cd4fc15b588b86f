"""Tensors that live on another stage: their shape is known here, their values are not.

The user's ``training_step`` runs on every stage, so it meets layers whose parameters are elsewhere. Such a parameter,
and whatever an absent layer would have computed, is an :class:`AbsentTensor`. Shape, dtype and device are right, so
masks, position ids and reshapes work. Values don't exist: every operation on it is done on the meta device, without
memory and without arithmetic. What depends on an absent tensor is absent too::

    hidden = embed(ids)           absent on stage 1: the output of 'embed'
    mask = torch.ones_like(hidden)[..., 0]          depends on the shape alone: an ordinary tensor
    penalty = hidden.pow(2).mean()                  absent, with the origin 'embed'

So a value that another stage has, and that no message brings, never turns into a silent zero. It reaches this stage's
output or the loss as an absent tensor, which names its origin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_parallel.torch_private import (
    buffers_of,
    dispatch_disabled,
    make_parameter,
    parameters_of,
    subclass_functions_disabled,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    wrapper_tensor,
    written_arguments,
)

ANSWERS_KEPT = 32  # of one module, for the inputs that came last


class AbsentValueError(RuntimeError):
    """Code asked for the values of a tensor that another stage holds.

    Attributes:
        origins: what that tensor was computed from.
    """

    def __init__(self, message: str, origins: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.origins = origins


class AbsentTensor(Tensor):
    """A tensor without values.

    Attributes:
        origins: what it was computed from, in words for an error: "the output of 'blocks.1'".
    """

    origins: frozenset[str]

    @staticmethod
    def __new__(
        cls, like: Tensor, device: torch.device, origins: frozenset[str], requires_grad: bool = False
    ) -> AbsentTensor:
        self = wrapper_tensor(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device, requires_grad=requires_grad
        )
        self.origins = origins
        return self

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

    def _refuse(self, name: str) -> NoReturn:
        raise AbsentValueError(
            f"{name} failed on {self.origin}, which lives on another pipeline stage: its shape is known here, its "
            f"values are not.",
            self.origins,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        copy = AbsentTensor(self, self.device, self.origins, self.requires_grad)
        if isinstance(self, nn.Parameter):
            make_parameter(copy)
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Tensor's own would make every result an AbsentTensor, also those that have values.
        with subclass_functions_disabled():
            return func(*args, **(kwargs or {}))

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
        flat, spec = tree_flatten((args, kwargs))
        absent = [x for x in flat if isinstance(x, AbsentTensor)]
        origins = absent[0].origins.union(*(x.origins for x in absent[1:]))
        _refuse_writes_into_present_tensors(func, args, kwargs, absent[0].origin, origins)
        if torch.Tag.inplace_view in func.tags:  # x.unsqueeze_(0) changes only what a tensor says of its shape
            with dispatch_disabled():
                return func(*args, **kwargs)

        to_meta = [_meta_of(x) for x in flat]
        meta_args, meta_kwargs = tree_unflatten(to_meta, spec)
        device = absent[0].device
        if "device" in meta_kwargs:  # x.to("cuda"): the result is said to be there, and still has no values
            device = torch.device(meta_kwargs["device"] or device)
            meta_kwargs["device"] = torch.device("meta")
        try:
            out = func(*meta_args, **meta_kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise AbsentValueError(
                f"{func} failed on {absent[0].origin}, which lives on another pipeline stage: its shape is known here, "
                f"its values are not ({error}).",
                origins,
            ) from error
        if func in _FILLED and not isinstance(args[0], nn.Parameter):  # like a parameter: an optimizer's state
            return torch.full_like(out, _FILLED[func](*args), device=device)

        known = {id(m): x for m, x in zip(to_meta, flat, strict=True) if isinstance(x, AbsentTensor)}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in known:  # in place: the same object
                same = known[id(value)]
                same.origins = origins
                return same
            return AbsentTensor(value, device, origins)

        return tree_map(wrap, out)


# Operations that only read the shape of their input, each with the value that fills the result.
_FILLED: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.zeros_like.default: lambda like: 0,
    torch.ops.aten.ones_like.default: lambda like: 1,
    torch.ops.aten.full_like.default: lambda like, value: value,
    torch.ops.aten.new_zeros.default: lambda like, size: 0,
    torch.ops.aten.new_ones.default: lambda like, size: 1,
    torch.ops.aten.new_full.default: lambda like, size, value: value,
}


def _meta_of(value: Any) -> Any:
    if isinstance(value, AbsentTensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    return value


def _refuse_writes_into_present_tensors(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: str, origins: frozenset[str]
) -> None:
    """After ``present[mask] = absent``, the tensor would look like a value that it isn't."""
    for written in written_arguments(func, args, kwargs):
        if any(isinstance(x, Tensor) and not isinstance(x, AbsentTensor) for x in tree_leaves(written)):
            raise AbsentValueError(
                f"{func} writes {origin}, which lives on another pipeline stage, into a tensor of this one.", origins
            )


def absent_like(tensor: Tensor, origin: str, device: torch.device | None = None) -> AbsentTensor:
    """A tensor like ``tensor`` without its values. A parameter stays one, trainable or frozen as it was.

    Args:
        tensor: gives shape, strides and dtype.
        origin: what the new tensor is, in words for an error.
        device: where it is said to be; by default the tensor's.
    """
    absent = AbsentTensor(tensor, device or tensor.device, frozenset([origin]))
    if isinstance(tensor, nn.Parameter):
        absent.requires_grad_(tensor.requires_grad)
        make_parameter(absent)
    return absent


def first_absent(value: Any) -> AbsentTensor | None:
    """The first absent tensor in a nested structure, or None."""
    if isinstance(value, Tensor):
        return value if isinstance(value, AbsentTensor) else None
    if type(value) in (tuple, list, dict):  # torch's walk is slow, and every layer's input is looked at
        inside = value.values() if type(value) is dict else value
        return next((x for x in map(first_absent, inside) if x is not None), None)
    return next((x for x in tree_leaves(value) if isinstance(x, AbsentTensor)), None)


def make_absent(module: nn.Module, origin: Callable[[str], str], device: torch.device) -> None:
    """Replace every parameter and buffer of ``module`` by an absent one. The memory is freed with its last user.

    Args:
        module: with all its submodules.
        origin: gives the words for a tensor's name.
        device: where the absent tensors are said to be.
    """
    for prefix, submodule in module.named_modules():
        for name, tensor in [*parameters_of(submodule).items(), *buffers_of(submodule).items()]:
            if tensor is not None and not isinstance(tensor, AbsentTensor):
                absent = absent_like(tensor, origin(f"{prefix}.{name}" if prefix else name), device)
                setattr(submodule, name, absent)  # not into the dictionaries: an RNN keeps a second list of its weights


class AbsentForward:
    """The ``forward`` of a module that another stage owns: it answers with absent tensors in the right structure.

    The module's own forward is asked once for each signature of its inputs, on absent tensors. After that, a call costs
    a look-up. Nothing is drawn from the generators that the stage's own layers use.

    Args:
        module: whose forward it is.
        name: of the module.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._forward = module.forward
        self._name = name
        # By signature: the answer's leaves, tensors as meta tensors; their device; the structure.
        self._answers: OrderedDict[Any, tuple[list[Any], torch.device, Any]] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(args, kwargs)

    @torch.compiler.disable
    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: int = 0) -> Any:
        """What the module's call number ``call`` in a step returns."""
        # Autocast decides about the dtypes of operations, on any device.
        autocast = [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in ("cpu", "cuda")]
        key = (_signature(args), _signature(kwargs), self._module.training, *autocast)
        if key not in self._answers:
            self._answers[key] = self._ask(args, kwargs)
            if len(self._answers) > ANSWERS_KEPT:  # a number that counts up is part of the signature
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        kept, device, structure = self._answers[key]
        origins = frozenset([origin_of(self._name, call)])
        # A new tensor each time: an in-place operation of the caller must not reach the next answer.
        fresh = [AbsentTensor(x, device, origins) if isinstance(x, Tensor) else x for x in kept]
        return tree_unflatten(fresh, structure)

    def _ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], torch.device, Any]:
        with torch.no_grad():
            out = self._forward(*_absentees(args), **_absentees(kwargs))
        leaves, structure = tree_flatten(out)
        tensors = [x for x in tree_leaves((args, kwargs, leaves)) if isinstance(x, Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        return [_meta_of(x) for x in leaves], device, structure


def origin_of(module: str, call: int) -> str:
    """How the output of a module's call is named, as an origin."""
    return f"the output of '{module}'" + (f" (call {call + 1})" if call else "")


def _absentees(tree: Any) -> Any:
    return tree_map(
        lambda x: absent_like(x, "an input") if isinstance(x, Tensor) and not isinstance(x, AbsentTensor) else x, tree
    )


def _signature(x: Any) -> Any:
    """Equal for inputs of equal structure, shapes and plain values. A deep model has many absent layers, each of which
    asks for it in every microbatch; torch's walk through containers takes three times as long."""
    if isinstance(x, Tensor):
        with subclass_functions_disabled():
            return (x.shape, x.dtype, x.device)
    if isinstance(x, (tuple, list)):
        return (type(x), *map(_signature, x))
    if isinstance(x, dict):
        return (type(x), *((key, _signature(value)) for key, value in x.items()))
    if isinstance(x, (int, float, str, bool, type(None), torch.dtype, torch.device, Enum)):
        return (type(x), x)  # 1 == True == 1.0
    leaves, spec = tree_flatten(x)
    return type(x) if spec.is_leaf() else (str(spec), *map(_signature, leaves))
