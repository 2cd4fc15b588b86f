"""Prompts as batches of tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def batches_of(prompts: Sequence[Sequence[int]], size: int, padding: int, *, pad: bool) -> list[dict[str, Tensor]]:
    """Batches as :meth:`recipes.models.language_model.LanguageModel.predict_step` takes them.

    Args:
        prompts: the tokens of each.
        size: prompts in a batch, at most.
        padding: token to the left of shorter ones.
        pad: prompts of several lengths may share a batch.
    """
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
