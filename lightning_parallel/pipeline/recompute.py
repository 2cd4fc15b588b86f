"""Activation checkpointing (arXiv:1604.06174): a layer keeps only its inputs, and runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.pipeline.seeding import host_generators_from, host_generators_now


def recomputed(layer: nn.Module, draws_on_host: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer's ``forward`` so that its backward runs it again.

    Args:
        layer: whose forward it is.
        draws_on_host: it draws from Python's or NumPy's generator: it does so again. torch sees to its own generators.
        forward: of the layer.
        args, kwargs: of ``forward``.
    """
    if torch.is_grad_enabled():
        args, kwargs = without_caches(args, kwargs)
    drawn = host_generators_from(host_generators_now()) if draws_on_host else nullcontext()

    @contextmanager
    def again() -> Iterator[None]:
        with drawn, _buffers_kept(layer):
            yield

    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again()), **kwargs)


@contextmanager
def _buffers_kept(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer runs again: its statistics of the inputs (BatchNorm) are not to count them twice."""
    before = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, content in before:
            buffer.data.copy_(content)


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
