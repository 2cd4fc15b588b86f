"""What the language models share: the steps, their loss and what they log; and text that goes on from a prompt."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel import in_passes
from lightning_parallel.passes import Passes
from recipes.models.generation import Generation


class LanguageModel(L.LightningModule):
    """``forward`` takes tokens [batch, time] to logits [batch, time, vocabulary]. The loss is their mean cross entropy.

    A batch is ``(tokens, targets)``, both int64 [batch, time]. Logs ``train_loss``, ``val_loss`` and ``test_loss``.

    Attributes:
        generation: how ``predict_step`` goes on from prompts.
        context: tokens that the model sees at most; None for any number.
        longest: tokens that a text may have; None for any number.
        takes_padding: prompts of several lengths may share a batch.
        ends: tokens that end a text, besides the tokenizer's own.
    """

    context: int | None = None
    longest: int | None = None
    takes_padding = False
    ends: frozenset[int] = frozenset()

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

    @in_passes
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Passes:
        """Goes on from prompts.

        Args:
            batch: ``input_ids`` int64 [batch, time], the padding at the left; ``attention_mask`` of the same shape;
                ``prompt``, their numbers, int64 [batch].

        Returns:
            The new tokens, int64 [batch, max_new_tokens].
        """
        tokens, attended, prompts = batch["input_ids"], batch["attention_mask"], batch["prompt"]
        settings = self.generation
        kept = self.begin_text(tokens.shape[1] + settings.max_new_tokens)
        first = tokens.shape[1]
        going = torch.ones_like(prompts, dtype=torch.bool)
        for place in range(settings.max_new_tokens):
            seen = tokens.shape[1] - 1 if place else 0
            new: Tensor = yield partial(self._choose, prompts, place, tokens, attended, kept, seen)
            new = new.where(going, settings.padding)
            tokens = torch.cat([tokens, new[:, None]], dim=1)
            attended = torch.cat([attended, torch.ones_like(new)[:, None]], dim=1)
            settings.told(prompts[going], new[going])
            for end in settings.ends:
                going = going & (new != end)
            if not going.any():
                break
        return F.pad(tokens[:, first:], (0, first + settings.max_new_tokens - tokens.shape[1]), value=settings.padding)

    def _choose(self, prompts: Tensor, place: int, *text: Any) -> Tensor:
        return self.generation.choose(self.next_logits(*text), prompts, place)

    def begin_text(self, length: int) -> Any:
        """What the layers keep of earlier tokens, in texts of at most ``length``. By default nothing."""
        return None

    def next_logits(self, tokens: Tensor, attended: Tensor, kept: Any, seen: int) -> Tensor:
        """Logits [batch, vocabulary] of the token after ``tokens``.

        Args:
            tokens: int64 [batch, time].
            attended: where these aren't padding, of the same shape.
            kept: of the first ``seen`` of them; None for nothing.
        """
        logits: Tensor = self(tokens if self.context is None else tokens[:, -self.context :])
        return logits[:, -1]
