"""Finds code outside of a layer that reads a divided parameter of the layer, or asks for its size: it gets a part's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from lightning_parallel.private.torch.tensors import tensors_in
from lightning_parallel.ranks.local_model import memory_of
from lightning_parallel.tensor.functions import has_memory
from lightning_parallel.values import first_few

_SIZES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel)  # type: ignore[attr-defined]

_PRODUCTS = (
    F.linear, F.embedding, F.cosine_similarity, torch.matmul, torch.mm, torch.bmm, torch.einsum, torch.cdist,
    Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__,
)  # fmt: skip


class ReadsOfShards(TorchFunctionMode):
    """Inside, records in ``found``, by the parameter's name, the functions that read a divided parameter (one of
    ``names``) while no method of its layer runs: in training those through which a gradient flows back, and in an
    evaluation, which begins with gradients off, products such as F.linear(x, weight). In ``sizes`` it records the
    names of the parameters whose size a module's code outside of the layer asks for.

    A step may read parameters by itself, as an L2 penalty over ``self.parameters()`` does. Each rank would compute a
    penalty of its own shard. Comparing the ranks' losses may miss it: shards of ones and zeros have equal norms at the
    start, and a small penalty is lost in rounding.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.sizes: set[str] = set()
        self._modules = {id(part) for part in module.modules()}
        self._is_evaluation = not torch.is_grad_enabled()
        self._names = WeakIdKeyDictionary()  # of divided parameters, and of views of them
        self._owners: dict[str, list[nn.Module]] = {}
        for name in names:
            owner, _, own = name.rpartition(".")
            holder = module.get_submodule(owner)
            parameter = getattr(holder, own)
            counts = isinstance(parameter, Tensor) and (parameter.requires_grad or self._is_evaluation)
            if counts and has_memory(parameter):
                self._owners.setdefault(self._names.setdefault(parameter, name), []).append(holder)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():
            return result
        given: list[str] = [self._names[tensor] for tensor in tensors_in((args, kwargs)) if tensor in self._names]
        if given and func in _SIZES and self._is_asked_from_outside(given[0]):
            self.sizes.add(given[0])
        for name in given if given and self._matters(func, result) else ():
            # The stack is searched for a method of the layer: `layer.forward(x)` calls no hooks.
            if not any(own is owner for own in _running() for owner in self._owners[name]):
                self.found.setdefault(name, resolve_name(func) or getattr(func, "__name__", str(func)))
        if given and self._is_evaluation:
            self._follow_views(args, result)
        return result

    def _matters(self, function: Callable[..., Any], result: Any) -> bool:
        """Does a shard's read matter? In training, a result without a gradient (a shape, a copy for an average) can't
        change what is trained. In an evaluation, other functions than products may take a shard's dtype, update an
        average of it, or compute its norm."""
        if self._is_evaluation:
            return function in _PRODUCTS
        return any(tensor.requires_grad and tensor not in self._names for tensor in tensors_in(result))

    def _follow_views(self, args: tuple[Any, ...], result: Any) -> None:
        """Take views of a shard, such as its transpose, for the shard. Inference mode doesn't tell views by itself."""
        shards = [tensor for tensor in tensors_in(args) if tensor in self._names]
        for view in tensors_in(result):
            memory = memory_of(view)
            name = next((self._names[shard] for shard in shards if memory_of(shard) == memory != 0), None)
            if name is not None:
                self._names.setdefault(view, name)

    def _is_asked_from_outside(self, name: str) -> bool:
        """Is the innermost method on the stack, this file's aside, one of a module that isn't the parameter's owner?"""
        asks = next((own for own in _running() if not isinstance(own, ReadsOfShards)), None)
        return id(asks) in self._modules and all(asks is not own for own in self._owners[name])


def _running() -> Iterator[Any]:
    """The objects of which methods are running, the innermost first."""
    frame = inspect.currentframe()
    # Its own locals would hold itself: a circle, which keeps the whole stack, and the step's tensors with it.
    frame = None if frame is None else frame.f_back
    while frame is not None:
        own = frame.f_locals.get("self")
        if own is not None:
            yield own
        frame = frame.f_back


@contextmanager
def sizes_watched(module: nn.Module, names: Collection[str], where: str) -> Iterator[None]:
    """Warn if code of the module's asks for the size of a divided parameter (one of ``names``) inside: a rank holds a
    part of it. ``where`` is the hook that runs."""
    with ReadsOfShards(module, names) if names else nullcontext() as reads:
        yield
    if reads is not None:
        warn_of_sizes(reads.sizes, where)


def warn_of_sizes(names: Collection[str], where: str) -> None:
    """Warn of divided parameters whose sizes have been asked for."""
    if names:
        rank_zero_warn(
            f"{where} asks for the size of {first_few(map(repr, sorted(names)))}, which the plan divides: it gets that "
            f"of a rank's part. What depends on it, such as a learning rate by width or a count of parameters, differs "
            f"from that of one process; the number of dimensions doesn't. Take the size from the model's "
            f"configuration, or leave the layer out of the plan."
        )
