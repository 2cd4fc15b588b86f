"""How the next token is chosen, and what the layers keep of those before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.pipeline.absent import AbsentTensor
from lightning_parallel.pipeline.seeding import mix


@dataclass(frozen=True)
class Generation:
    """
    Attributes:
        max_new_tokens: for each prompt, at most.
        temperature: 0 takes the most likely token; 1 draws from the model's own distribution.
        top_k: draw among so many of the most likely ones; None: among all.
        top_p: draw among the most likely ones that together have this probability.
        ends: tokens that end a text.
        padding: token in the place of those after the end.
        seed: of what is drawn. It goes by prompt and place, so a text doesn't depend on the layout.
        told: called with the numbers of prompts and their new tokens, both [batch].
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    ends: frozenset[int] = frozenset()
    padding: int = 0
    seed: int = 0
    told: Callable[[Tensor, Tensor], None] = lambda prompts, tokens: None

    def choose(self, logits: Tensor, prompts: Tensor, place: int) -> Tensor:
        """The next token of each text, int64 [batch].

        Args:
            logits: [batch, vocabulary].
            prompts: their numbers, int64 [batch].
            place: in the new text.

        Raises:
            ValueError: the logits aren't numbers.
        """
        if logits.isnan().any():
            raise ValueError(
                "The model's logits are not numbers. Some models' are so for padded prompts: use --batch-size 1, or "
                "another trainer.precision."
            )
        if not self.temperature:
            return logits.argmax(-1)
        logits = logits.double() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None:
            ordered, order = logits.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            left_out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            logits = logits.masked_fill(left_out, -torch.inf)
        return (logits + self._gumbel(logits.shape[-1], prompts, place).to(logits.device)).argmax(-1)

    def _gumbel(self, size: int, prompts: Tensor, place: int) -> Tensor:
        """The largest of logits with such numbers added is a draw from their softmax (Gumbel 1954)."""
        rows = []
        for prompt in prompts.tolist():
            generator = torch.Generator().manual_seed(mix(self.seed, prompt, place))
            rows.append(torch.rand(size, dtype=torch.float64, generator=generator))
        return -(-torch.stack(rows).log()).log()


def static_cache(model: Any, length: int) -> Any | None:
    """What the layers of a model of transformers keep of earlier tokens, for texts of at most ``length`` tokens; None
    for a model that keeps something else.

    In a pipeline a rank has the keys and values of its own layers. How many tokens there are is counted here, since
    masks and positions go by the first layer's.
    """
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(own, "_can_compile_fullgraph", False):  # transformers' mark of models that work with such a cache
        return None

    class Cache(StaticCache):
        seen = 0  # tokens that have been kept

        def begin(self, seen: int) -> None:
            """Before a pass."""
            self.seen = seen
            layers: list[Any] = self.layers
            for layer in layers:
                layer.cumulative_length.fill_(seen)
                if isinstance(layer, StaticSlidingWindowLayer):
                    layer.cumulative_length_int = seen

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.seen

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return self.seen

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            if isinstance(key_states, AbsentTensor):  # of a layer that another rank runs: only sizes count
                size, _ = self.get_mask_sizes(key_states.shape[-2], layer_idx)
                return _resized(key_states, size), _resized(value_states, size)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    cache = Cache(config=model.config, max_cache_len=length)
    cache.length = length  # type: ignore[attr-defined]
    return cache if all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in cache.layers) else None


def _resized(states: Tensor, size: int) -> Tensor:
    return states[..., :1, :].expand(*states.shape[:-2], size, states.shape[-1])
