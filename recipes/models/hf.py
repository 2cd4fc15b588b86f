"""A causal language model of transformers, unmodified, from a folder of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from recipes.data.base import SeededData
from recipes.data.hf import HFData
from recipes.models.hf_folder import (
    StagedCache,
    check_fit,
    give_exact_buffers,
    has_weights,
    opened,
    rope_limit,
    static_cache,
    takes,
    with_adapters,
)  # fmt: skip
from recipes.models.language_model import LanguageModel
from recipes.models.optimizer import configure


class CausalLM(LanguageModel):
    """Trains a folder's model: the weights that are in it, or new ones for a folder with a ``config.json`` alone.

    Weights are trained in float32, whatever they are stored in, unless ``trainer.precision`` says otherwise. Files are
    mapped into memory. A rank converts what it keeps: its own part under pipelines, tensor parallelism and fully
    sharded replicas.

    Args:
        path: the folder, as ``save_pretrained`` writes it.
        lora: arguments of ``peft.LoraConfig``. The adapters are trained, and nothing else. None trains everything.
        optimizer, scheduler: see :func:`recipes.models.optimizer.configure`.

    A batch is ``(tokens, targets)``, both int64 [batch, time], the targets one token ahead; or a dictionary of what
    the model takes, and ``labels``, of which the loss is a mean. Logs ``train_loss``, ``val_loss`` and ``test_loss``.

    Raises:
        ModuleNotFoundError: transformers, or peft for ``lora``, isn't installed.
        ValueError: the folder has no model that transformers knows, or ``lora`` fits nothing in it.
    """

    def __init__(
        self,
        *,
        optimizer: Mapping[str, Any],
        scheduler: Mapping[str, Any] | None = None,
        path: str,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer = dict(optimizer)
        self.scheduler = dict(scheduler) if scheduler else None
        model = opened(path)
        self.model = model if lora is None else with_adapters(model, lora)
        self.model.train()  # from_pretrained gives it in evaluation's mode
        self._rope_limit = rope_limit(self.model.config)
        # Otherwise what padding does differs from model to model: it is read (recurrent layers), or not a number comes
        # of it (BLOOM).
        keeps = static_cache(self.model, 1) is not None and self._rope_limit is None
        self.takes_padding = keeps and takes(self.model, "position_ids")
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        self.end_tokens = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.longest = getattr(model.config, "max_position_embeddings", None)
        self.loss_is_cross_entropy = not getattr(model.config, "output_router_logits", False)
        self._is_set_up, self._converts = False, True

    def setup(self, stage: str) -> None:
        """Before the first run, while every rank holds the whole model: refuse data that it can't be trained on. Where
        it won't be divided, convert it."""
        if self._is_set_up:
            return
        self._is_set_up = True
        self._converts = self.trainer.precision in ("32-true", "bf16-mixed", "16-mixed")
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, HFData):
            check_fit(self.model, data)
        elif isinstance(data, SeededData) and has_weights(Path(self.hparams["path"])):
            rank_zero_warn("model.path has weights for other tokens, and these data are bytes: use data=hf.")
        give_exact_buffers(self.model)
        if not getattr(self.trainer.strategy, "calls_configure_part", False):
            self.configure_part()

    def configure_part(self) -> None:
        """Convert what this rank holds, unless the Trainer has done so."""
        if self._converts:
            self.model.float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, time, vocabulary] of the token after each of ``tokens`` [batch, time]."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def _loss(self, batch: Any) -> Tensor:
        if not isinstance(batch, Mapping):
            return super()._loss(batch)
        given = {key: value for key, value in batch.items() if key not in ("labels", "labels_in_batch")}
        output = self.model(**given, use_cache=False)
        logits, labels = output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        if "labels_in_batch" in batch:  # at least one, since each row has some; replicas' losses are averaged
            loss = F.cross_entropy(logits, labels, reduction="sum") / (batch["labels_in_batch"][0] / self._replicas)
        else:
            loss = F.cross_entropy(logits, labels)
        balance = getattr(output, "aux_loss", None)  # of a mixture's experts, with output_router_logits
        config: Any = self.model.config
        return loss if balance is None else loss + config.router_aux_loss_coef * balance

    @property
    def _replicas(self) -> int:
        return int((self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))

    def _weight(self, batch: Any) -> int | None:
        counted = isinstance(batch, Mapping) and "labels_in_batch" in batch
        return int(batch["labels_in_batch"][0]) if counted else None

    def make_cache(self, length: int) -> StagedCache | None:
        if not takes(self.model, "past_key_values") or (self._rope_limit is not None and length > self._rope_limit):
            return None
        return static_cache(self.model, length)

    def next_logits(self, tokens: Tensor, attention_mask: Tensor, cache: Any, cached: int) -> Tensor:
        more: dict[str, Any] = {"use_cache": False}
        if cache is None:
            cached = 0
        else:
            cache.begin(cached)
            more = {"past_key_values": cache, "use_cache": True}
        if takes(self.model, "position_ids"):
            more["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, cached:]
        if cache is not None:  # of one size throughout, as the masks that the layers get are
            attention_mask = F.pad(attention_mask, (0, cache.length - attention_mask.shape[1]))
        if takes(self.model, "logits_to_keep"):
            more["logits_to_keep"] = 1
        if takes(self.model, "output_router_logits"):  # their loss is of whole texts
            more["output_router_logits"] = False
        logits: Tensor = self.model(input_ids=tokens[:, cached:], attention_mask=attention_mask, **more).logits
        return logits[:, -1]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        outer = {id(parameter) for part in _outer(self.model) for parameter in part.parameters()}
        matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in outer]
        return configure(trained, self.optimizer, self.scheduler, matrices)


def _outer(model: Any) -> list[nn.Module]:
    """The embeddings and the output layer, which Muon leaves to AdamW."""
    output = model.get_output_embeddings()
    return [part for part in model.modules() if part is output or isinstance(part, nn.Embedding)]
