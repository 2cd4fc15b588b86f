"""What the language models share: the steps, their loss and what they log; and text that goes on from a prompt."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.models.generation import Generation


class LanguageModel(L.LightningModule):
    """``forward`` takes tokens [batch, time] to logits [batch, time, vocabulary]. The loss is their mean cross entropy.

    A batch is ``(tokens, targets)``, both int64 [batch, time]. Logs ``train_loss``, ``val_loss`` and ``test_loss``.

    Attributes:
        generation: how ``predict_step`` goes on from prompts.
        context: tokens that the model sees at most; None for any number.
        longest: tokens that a text may have; None for any number.
        takes_padding: prompts of several lengths may share a batch.
        end_tokens: tokens that end a text, besides the tokenizer's own.
        loss_is_cross_entropy: alone, with nothing added to it.
    """

    context: int | None = None
    longest: int | None = None
    takes_padding = False
    end_tokens: frozenset[int] = frozenset()
    loss_is_cross_entropy = True

    def __init__(self) -> None:
        super().__init__()
        self.generation = Generation()

    def _loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True, batch_size=self._weight(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), sync_dist=True, batch_size=self._weight(batch))

    def _weight(self, batch: Any) -> int | None:
        """Of a batch's loss in the mean over all batches; None for the number of its samples."""
        return None

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Goes on from prompts.

        Args:
            batch: ``input_ids`` int64 [batch, time], the padding at the left; ``attention_mask`` of the same shape;
                ``prompt_number``, int64 [batch].

        Returns:
            The new tokens, int64 [batch, max_new_tokens].
        """
        tokens, attention_mask, numbers = batch["input_ids"], batch["attention_mask"], batch["prompt_number"]
        settings, length = self.generation, tokens.shape[1]
        cache = self.make_cache(length + settings.max_new_tokens)
        going = torch.ones_like(numbers, dtype=torch.bool)
        for place in range(settings.max_new_tokens):
            cached = tokens.shape[1] - 1 if place else 0
            logits = self.next_logits(tokens, attention_mask, cache, cached)
            new = settings.choose(logits, numbers, place).where(going, settings.padding)
            tokens = torch.cat([tokens, new[:, None]], dim=1)
            attention_mask = torch.cat([attention_mask, torch.ones_like(new)[:, None]], dim=1)
            for end in settings.end_tokens:
                going = going & (new != end)
            if not going.any():
                break
        missing = length + settings.max_new_tokens - tokens.shape[1]
        return F.pad(tokens[:, length:], (0, missing), value=settings.padding)

    def make_cache(self, length: int) -> Any:
        """What the layers keep of earlier tokens, in texts of at most ``length``. By default nothing."""
        return None

    def next_logits(self, tokens: Tensor, attention_mask: Tensor, cache: Any, cached: int) -> Tensor:
        """Logits [batch, vocabulary] of the token after ``tokens``.

        Args:
            tokens: int64 [batch, time].
            attention_mask: 0 where these are padding, of the same shape.
            cache: has what the layers kept of the first ``cached`` of them; None for nothing.
        """
        logits: Tensor = self(tokens if self.context is None else tokens[:, -self.context :])
        return logits[:, -1]
