"""Activation checkpointing (arXiv:1604.06174): a layer keeps only its inputs, and runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline.seeding import host_generators_from, host_generators_now
from lightning_parallel.torch_private import buffers_of, parameters_of


class Recomputed:
    """A layer's forward that runs again in each backward through it, as it ran the first time.

    Args:
        layer: whose forward it is.
        forward: of the layer.
        draws_on_host: it draws from Python's or NumPy's generator: it does so again. torch sees to its own generators.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any], draws_on_host: bool = False) -> None:
        self._layer, self._forward, self._draws_on_host = layer, forward, draws_on_host
        self._written: set[tuple[int, str]] | None = None  # by the first run: where its tensors are

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        args, kwargs = without_caches(args, kwargs)
        kept = [(store, name, _copy(tensor)) for store, name, tensor in self._places()]
        again = _Again(kept, host_generators_now() if self._draws_on_host else None)
        output = checkpoint(
            self._forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **kwargs
        )
        if self._written is None:
            # By values: BatchNorm writes to its statistics without counting their versions.
            self._written = {(id(store), name) for store, name, old in kept if not _equal(store.get(name), old)}
        return output

    def _places(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """The tensors without gradient that the layer writes to, and where they are: BatchNorm's statistics, a
        codebook. Before the first run, all without gradient."""
        for part in self._layer.modules():
            for store in (buffers_of(part), parameters_of(part)):
                for name, tensor in store.items():
                    may_be_written = self._written is None or (id(store), name) in self._written
                    if may_be_written and tensor is not None and not tensor.requires_grad:
                        yield store, name, tensor


class _Again:
    """Around a further run of a layer: what it writes to is as it was before the first run, and afterwards as now.

    Args:
        tensors: those tensors, and where they belong.
        drawn: the states of Python's and NumPy's generators before the first run; None if the layer leaves them alone.
    """

    def __init__(self, tensors: Sequence[tuple[dict[str, Any], str, Tensor]], drawn: tuple[Any, Any] | None) -> None:
        self._tensors, self._drawn = tensors, drawn
        self._now: list[tuple[dict[str, Any], str, Tensor | None]] = []
        self._generators = ExitStack()

    def __enter__(self) -> None:
        self._now = [(store, name, store.get(name)) for store, name, _ in self._tensors]
        for store, name, tensor in self._tensors:
            store[name] = _copy(tensor)  # there may be another backward
        if self._drawn is not None:
            self._generators.enter_context(host_generators_from(self._drawn))

    def __exit__(self, *error: Any) -> None:
        self._generators.close()
        for store, name, tensor in self._now:
            store[name] = tensor


def _equal(tensor: Tensor | None, old: Tensor) -> bool:
    return tensor is not None and tensor.shape == old.shape and torch.equal(tensor, old)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer that is to run twice."""
    return tuple(None if _is_cache(x) else x for x in args), {
        name: None if _is_cache(x) else x for name, x in kwargs.items()
    }


def _is_cache(x: Any) -> bool:
    """Is it a cache of keys and values? transformers' models pass one to their layers by default. Training doesn't read
    it; a layer that runs twice would append to it twice, and attend to both. Their own checkpointing leaves it out
    too."""
    return any(kind.__name__ == "Cache" and kind.__module__.startswith("transformers.") for kind in type(x).__mro__)
