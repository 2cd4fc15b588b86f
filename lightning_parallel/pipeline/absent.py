"""Tensors that live on another stage: their shape is known here, their values are not.

The user's ``training_step`` runs on every stage, so it meets layers whose parameters are elsewhere. Such a
parameter, and whatever an absent layer would have computed, is an :class:`AbsentTensor`: shape, dtype and device are
right, so masks, position ids and reshapes go on as ever; values don't exist, and every operation on it is done on the
meta device, with no memory and no arithmetic. What depends on an absent tensor is absent too. So a value that crosses
stages outside the pipeline's own messages (a skip connection over the cut, a penalty on all parameters) can't end in
a silent zero: it arrives at a stage's output or at the loss as an absent tensor, which names where it came from.

Made with ``torch.Tensor._make_wrapper_subclass``, the constructor that torch documents for subclasses with
``__torch_dispatch__`` ("Extending PyTorch"); ``tests/pipeline/test_absent.py`` pins what is used of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class AbsentValueError(RuntimeError):
    """Code asked for the values of a tensor that another stage holds."""


class AbsentTensor(Tensor):
    """A tensor without values.

    Attributes:
        meta: the meta tensor that carries shape and dtype.
        origins: what it was computed from, in words for an error ("the output of 'blocks.1'").
    """

    meta: Tensor
    origins: frozenset[str]

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, origins: frozenset[str], requires_grad: bool = False
    ) -> AbsentTensor:
        self: AbsentTensor = Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        self.meta = meta
        self.origins = origins
        return self

    @property
    def origin(self) -> str:
        """One of the origins, for errors."""
        return min(self.origins)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentTensor({self.origin}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        copy = AbsentTensor(self.meta.detach(), self.device, self.origins, self.requires_grad)
        if getattr(self, "_is_param", False):
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        flat, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        absent = [x for x in flat if isinstance(x, AbsentTensor)]
        origins = absent[0].origins.union(*(x.origins for x in absent[1:]))
        _refuse_writes_into_real_tensors(func, args, absent[0])

        to_meta = [_meta_of(x) for x in flat]
        meta_args, meta_kwargs = pytree.tree_unflatten(to_meta, spec)
        device = absent[0].device
        if "device" in meta_kwargs:  # x.to("cuda"): the result says so, and still has no values
            device = torch.device(meta_kwargs["device"] or device)
            meta_kwargs["device"] = torch.device("meta")
        try:
            out = func(*meta_args, **meta_kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise AbsentValueError(
                f"{func} needs the values of {absent[0].origin}, which live on another pipeline stage ({error})."
            ) from error

        known = {id(m): x for m, x in zip(to_meta, flat, strict=True) if isinstance(x, AbsentTensor)}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in known:  # in-place: the same object
                same = known[id(value)]
                same.origins = origins
                return same
            return AbsentTensor(value, device, origins)

        return pytree.tree_map(wrap, out)


def _meta_of(value: Any) -> Any:
    if isinstance(value, AbsentTensor):
        return value.meta
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    return value


def _refuse_writes_into_real_tensors(func: Any, args: tuple[Any, ...], absent: AbsentTensor) -> None:
    """``real[mask] = absent`` would leave ``real`` looking like a value that it isn't."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(value, Tensor) and not isinstance(value, AbsentTensor):
            raise AbsentValueError(
                f"{func} writes {absent.origin}, which lives on another pipeline stage, into a tensor of this one."
            )


def absent_like(tensor: Tensor, origin: str, device: torch.device | None = None) -> AbsentTensor:
    """A tensor like ``tensor`` (a parameter stays one, trainable or frozen as it was), without its values."""
    absent = AbsentTensor(torch.empty_like(tensor, device="meta"), device or tensor.device, frozenset([origin]))
    if isinstance(tensor, nn.Parameter):
        absent.requires_grad_(tensor.requires_grad)
        absent._is_param = True  # what nn.Parameter's isinstance asks of subclasses
    return absent


def first_absent(value: Any) -> AbsentTensor | None:
    """The first absent tensor in a nested structure, or None."""
    return next((x for x in pytree.tree_leaves(value) if isinstance(x, AbsentTensor)), None)


def make_absent(module: nn.Module, origin: Callable[[str], str], device: torch.device) -> None:
    """Replace every parameter and buffer of ``module`` by an absent one. What it held is freed with its last user."""
    for prefix, submodule in module.named_modules():
        for store in (submodule._parameters, submodule._buffers):
            for name, tensor in store.items():
                if tensor is not None and not isinstance(tensor, AbsentTensor):
                    store[name] = absent_like(tensor, origin(f"{prefix}.{name}" if prefix else name), device)


class AbsentForward:
    """``forward`` of a module that another stage owns: answers with absent tensors of the right structure.

    The module's own forward is asked once for each signature of its inputs, on absent tensors; from then on a call
    costs a look-up. Nothing is drawn from the random number generators that the stage's own layers use.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._forward = module.forward
        self._name = name
        self._answers: dict[Any, tuple[list[Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(args, kwargs)

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: int = 0) -> Any:
        """What the ``call``-th call (in its step) returns."""
        key = _signature((args, kwargs))
        origins = frozenset([origin_of(self._name, call)])
        if key not in self._answers:
            device = next((x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
            with torch.no_grad():
                out = self._forward(*_absentees(args), **_absentees(kwargs))
            leaves, spec = pytree.tree_flatten(out)
            kept = [
                AbsentTensor(_meta_of(x), device or x.device, origins) if isinstance(x, Tensor) else x for x in leaves
            ]
            self._answers[key] = (kept, spec)
        kept, spec = self._answers[key]
        # An answer is given more than once: an in-place operation of the caller must not reach the kept one.
        return pytree.tree_unflatten(
            [AbsentTensor(x.meta, x.device, origins) if isinstance(x, AbsentTensor) else x for x in kept], spec
        )


def origin_of(module: str, call: int) -> str:
    """How the output of a module is named, as an origin."""
    return f"the output of '{module}'" + (f" (call {call + 1})" if call else "")


def _absentees(tree: Any) -> Any:
    return pytree.tree_map(
        lambda x: absent_like(x, "an input") if isinstance(x, Tensor) and not isinstance(x, AbsentTensor) else x, tree
    )


def _signature(tree: Any) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    return (str(spec), torch.is_autocast_enabled(), tuple(_leaf_signatures(leaves)))


def _leaf_signatures(leaves: list[Any]) -> Iterator[Any]:
    for x in leaves:
        if isinstance(x, Tensor):
            yield (x.shape, x.dtype)
        elif isinstance(x, (int, float, str, bool, type(None))):
            yield x
        else:
            yield type(x)
