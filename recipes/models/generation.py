"""Prompts as batches, and how the next token of a text is chosen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_parallel.seeding import mix


@dataclass(frozen=True)
class Generation:
    """The settings of a generation.

    Attributes:
        max_new_tokens: for each prompt, at most.
        temperature: 0 takes the most likely token; 1 draws from the model's own distribution.
        top_k: draw among so many of the most likely ones; None: among all.
        top_p: draw among the most likely ones that together have this probability.
        end_tokens: tokens that end a text.
        padding: token in the place of those after the end.
        seed: of what is drawn. It goes by the prompt's number and the place, so a text doesn't depend on the layout.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    end_tokens: frozenset[int] = frozenset()
    padding: int = 0
    seed: int = 0

    def choose(self, logits: Tensor, prompt_numbers: Tensor, place: int) -> Tensor:
        """The next token of each text, int64 [batch].

        Args:
            logits: [batch, vocabulary].
            prompt_numbers: int64 [batch].
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
        return (logits + self._gumbel(logits.shape[-1], prompt_numbers, place).to(logits.device)).argmax(-1)

    def _gumbel(self, size: int, prompt_numbers: Tensor, place: int) -> Tensor:
        """The largest of logits with such numbers added is a draw from their softmax (Gumbel 1954)."""
        rows = []
        for number in prompt_numbers.tolist():
            generator = torch.Generator().manual_seed(mix(self.seed, number, place))
            rows.append(torch.rand(size, dtype=torch.float64, generator=generator))
        return -(-torch.stack(rows).log()).log()


def batches_of(prompts: Sequence[Sequence[int]], size: int, padding: int, *, pad: bool) -> list[dict[str, Tensor]]:
    """Batches as :meth:`recipes.models.language_model.LanguageModel.predict_step` takes them. With ``pad``, prompts of
    several lengths may share one."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        by_length[0 if pad else len(prompt)].append(number)
    parts = [numbers[i : i + size] for numbers in by_length.values() for i in range(0, len(numbers), size)]
    return [_batch([prompts[number] for number in part], part, padding) for part in parts]


def _batch(prompts: Sequence[Sequence[int]], numbers: Sequence[int], padding: int) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        "prompt_number": torch.tensor(numbers),
    }
