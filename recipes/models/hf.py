"""A causal language model of transformers, unmodified, from a folder of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from recipes.models.language_model import LanguageModel
from recipes.models.optimizer import configure

_WEIGHTS = ("*.safetensors", "*.bin")  # the files in which a folder has weights


class CausalLM(LanguageModel):
    """Trains a folder's model: the weights that are in it, or new ones for a folder with a ``config.json`` alone.

    Weights are trained in float32, whatever they are stored in, unless ``trainer.precision`` says otherwise. Files of
    float32 are mapped into memory, so that a rank of a pipeline reads the part that it needs.

    Args:
        path: the folder, as ``save_pretrained`` writes it.
        lora: arguments of ``peft.LoraConfig``. The adapters are trained, and nothing else. None trains everything.
        optimizer, scheduler: see :func:`recipes.models.optimizer.configure`.

    A batch is ``(tokens, targets)``, both int64 [batch, time], the targets one token ahead; or a dictionary of what
    the model takes, with ``labels`` among it. Logs ``train_loss``, ``val_loss`` and ``test_loss``.

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
        model = _opened(path)
        self.model = model if lora is None else _with_adapters(model, lora)
        self.model.train()  # from_pretrained gives it in evaluation's mode

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, time, vocabulary] of the token after each of ``tokens`` [batch, time]."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def _loss(self, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            loss: Tensor = self.model(**batch, use_cache=False).loss
            return loss
        return super()._loss(batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        outer = {id(parameter) for part in _outer(self.model) for parameter in part.parameters()}
        matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in outer]
        return configure(trained, self.optimizer, self.scheduler, matrices)


def _opened(path: str) -> nn.Module:
    """The folder's model, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if any(file for pattern in _WEIGHTS for file in Path(path).glob(pattern)):
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.path={path}: transformers can't open it: {error}") from error
    whole: nn.Module = model.float()
    return whole


def _with_adapters(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    try:
        adapted: nn.Module = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, **lora))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.lora={dict(lora)}: {error}") from error
    return adapted


def _outer(model: Any) -> list[nn.Module]:
    """The embeddings and the output layer, which Muon leaves to AdamW."""
    output = model.get_output_embeddings()
    return [part for part in model.modules() if part is output or isinstance(part, nn.Embedding)]
