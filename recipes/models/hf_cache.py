"""What the layers of a model of transformers keep of earlier tokens, where each rank has some of the layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from lightning_parallel.absent.tensor import AbsentTensor
from recipes.models.hf_folder import without_adapters


class StagedCache(StaticCache):
    """Keys and values of the layers that this rank runs, for texts of at most ``length`` tokens. How many tokens there
    are (``cached``) is counted here, since masks and positions go by the first layer's, which may be on another
    rank."""

    def __init__(self, config: Any, length: int) -> None:
        super().__init__(config=config, max_cache_len=length)
        self.length = length
        self.cached = 0

    def begin(self, cached: int) -> None:
        """Before a pass: so many tokens are there."""
        self.cached = cached
        layers: list[Any] = self.layers
        for layer in layers:
            layer.cumulative_length.fill_(cached)
            if isinstance(layer, StaticSlidingWindowLayer):
                layer.cumulative_length_int = cached

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cached

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.cached

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if isinstance(key_states, AbsentTensor):  # of a layer that another rank runs: only sizes count
            size, _ = self.get_mask_sizes(key_states.shape[-2], layer_idx)
            return _resized(key_states, size), _resized(value_states, size)
        # Under autocast positions make keys float32 again, and a layer keeps both in the dtype of its keys.
        return super().update(key_states, value_states.to(key_states.dtype), layer_idx, *args, **kwargs)


def static_cache(model: Any, length: int) -> StagedCache | None:
    """A cache for texts of at most ``length`` tokens; None for a model that keeps something else, or doesn't work with
    keys and values of one size."""
    if not getattr(without_adapters(model), "_can_compile_fullgraph", False):  # transformers' mark of those that do
        return None
    cache = StagedCache(model.config, length)
    return cache if all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in cache.layers) else None


def _resized(states: Tensor, size: int) -> Tensor:
    return states[..., :1, :].expand(*states.shape[:-2], size, states.shape[-1])
