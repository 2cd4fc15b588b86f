"""Activation checkpointing (arXiv:1604.06174): a layer keeps only its inputs, and runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.private.torch.modules import buffers_of, parameters_of
from lightning_parallel.values import changed

_Place = tuple[dict[str, Any], str]  # a module's dictionary of buffers or parameters, and a name in it


class Recomputed:
    """A layer's forward that runs again in each backward through it, as it ran the first time."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self._layer, self._forward = layer, forward
        self._written: list[_Place] | None = None  # where the tensors are that the first run has written to

    # Dynamo can't trace torch's checkpoint with a context_fn: compiled code around it breaks here.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs)
        places = [*self._without_gradient()] if self._written is None else self._written
        before = [(store, name, _copy(store[name])) for store, name in places if store.get(name) is not None]
        output = checkpoint(
            self._forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _Again(before)), **kwargs
        )
        if self._written is None:
            # Copies of the others, such as frozen weights, are dropped. Values are compared: BatchNorm writes to its
            # statistics without raising their versions.
            before[:] = [(store, name, old) for store, name, old in before if not _equal(store.get(name), old)]
            self._written = [(store, name) for store, name, _ in before]
        return output

    def _without_gradient(self) -> Iterator[_Place]:
        """The tensors that the layer may write to: BatchNorm's statistics, a codebook."""
        for part in self._layer.modules():
            for store in (buffers_of(part), parameters_of(part)):
                yield from ((store, name) for name, x in store.items() if x is not None and not x.requires_grad)


class _Again:
    """A context for a further run of a layer: the tensors that it writes to have the values ``before`` the first run,
    and afterwards those of now."""

    def __init__(self, before: Sequence[tuple[dict[str, Any], str, Tensor]]) -> None:
        self._before, self._inside = before, ExitStack()

    def __enter__(self) -> None:
        copies = [(store, name, _copy(tensor)) for store, name, tensor in self._before]  # for another backward
        self._inside.enter_context(changed(copies))

    def __exit__(self, *error: Any) -> None:
        self._inside.close()


def _equal(tensor: Tensor | None, old: Tensor) -> bool:
    return tensor is not None and tensor.shape == old.shape and torch.equal(tensor, old)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a layer that is to run twice, without caches."""
    return tuple(None if _is_cache(x) else x for x in args), {
        name: None if _is_cache(x) else x for name, x in kwargs.items()
    }


def _is_cache(x: Any) -> bool:
    """Is it a cache of keys and values? transformers' models pass one to their layers by default. Training doesn't
    read it. A layer that runs twice would append to it twice, and attend to both. Their own checkpointing leaves it
    out too."""
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(x).__mro__)
