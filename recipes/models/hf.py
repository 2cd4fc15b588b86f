"""A causal language model of transformers, unmodified, from a folder of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_parallel.checkpoint.agreement import first_few
from recipes.data.hf import HFData
from recipes.models.generation import static_cache
from recipes.models.language_model import LanguageModel
from recipes.models.optimizer import configure

_READ = ("*.safetensors", "pytorch_model*.bin", "*.index.json")  # files of weights that transformers reads, and lists
_OTHERS = frozenset({".gguf", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".npz", ".onnx"})
WEIGHTS = _OTHERS | {".safetensors", ".bin"}  # suffixes of files of weights


class CausalLM(LanguageModel):
    """Trains a folder's model: the weights that are in it, or new ones for a folder with a ``config.json`` alone.

    Weights are trained in float32, whatever they are stored in, unless ``trainer.precision`` says otherwise. Files are
    mapped into memory, and a rank that holds a part of the model reads and converts its part only.

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
        model = _opened(path)
        self.model = model if lora is None else _with_adapters(model, lora)
        self.model.train()  # from_pretrained gives it in evaluation's mode
        self._rope_limit = rope_limit(self.model.config)
        # Otherwise what padding does differs from model to model: it is read (recurrent layers), or not a number comes
        # of it (BLOOM).
        keeps = static_cache(self.model, 1) is not None and self._rope_limit is None
        self.takes_padding = keeps and takes(self.model, "position_ids")
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        self.ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self.longest = getattr(model.config, "max_position_embeddings", None)
        self._is_set_up, self._converts = False, True

    def setup(self, stage: str) -> None:
        """Before the first run, while every rank holds the whole model: refuse data that it can't be trained on."""
        if self._is_set_up:
            return
        self._is_set_up = True
        self._converts = self.trainer.precision in ("32-true", "bf16-mixed", "16-mixed")
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, HFData):
            check_fit(self.model, data)
        if not getattr(self.trainer.strategy, "configures_part", False):
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
        if "labels_in_batch" in batch:
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

    def begin_text(self, length: int) -> Any:
        if not takes(self.model, "past_key_values") or (self._rope_limit is not None and length > self._rope_limit):
            return None
        return static_cache(self.model, length)

    def next_logits(self, tokens: Tensor, attended: Tensor, kept: Any, seen: int) -> Tensor:
        more: dict[str, Any] = {"use_cache": False}
        if kept is None:
            seen = 0
        else:
            kept.begin(seen)
            more = {"past_key_values": kept, "use_cache": True}
        if takes(self.model, "position_ids"):
            more["position_ids"] = (attended.cumsum(1) - 1).clamp(min=0)[:, seen:]
        if kept is not None:  # of one size throughout, as the masks that the layers get are
            attended = F.pad(attended, (0, kept.length - attended.shape[1]))
        if takes(self.model, "logits_to_keep"):
            more["logits_to_keep"] = 1
        logits: Tensor = self.model(input_ids=tokens[:, seen:], attention_mask=attended, **more).logits
        return logits[:, -1]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        outer = {id(parameter) for part in _outer(self.model) for parameter in part.parameters()}
        matrices = [parameter for parameter in trained if parameter.ndim == 2 and id(parameter) not in outer]
        return configure(trained, self.optimizer, self.scheduler, matrices)


def _opened(path: str) -> nn.Module:
    """The folder's model, in the dtype in which it is stored."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        if has_weights(Path(path)):
            given: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "output_loading_info": True}
            model, said = cast(Any, AutoModelForCausalLM.from_pretrained(path, **given))
            if said["missing_keys"]:
                raise ValueError(f"it has no {first_few(sorted(said['missing_keys']))}, which would begin at random")
            if said["unexpected_keys"]:
                rank_zero_warn(f"model.path={path}: not used: {first_few(sorted(said['unexpected_keys']))}.")
        else:
            rank_zero_info(f"model.path={path} has no weights: a new model begins.")
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
            if Path(path, "generation_config.json").exists():
                model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model.path={path}: transformers can't open it: {error}") from error
    opened: nn.Module = model
    return opened


def has_weights(folder: Path) -> bool:
    """Are weights in the folder of a model, which transformers reads?

    Raises:
        ValueError: there are others.
    """
    if any(file for pattern in _READ for file in folder.glob(pattern)):
        return True
    others = sorted(file.name for file in folder.iterdir() if file.suffix in _OTHERS)
    if others:
        raise ValueError(f"its weights are in {first_few(others)}: convert them to safetensors.")
    return False


def _with_adapters(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    try:
        if isinstance(lora.get("init_lora_weights"), str):
            model.float()  # some of these change the weights, too
        config = LoraConfig(**{"task_type": TaskType.CAUSAL_LM, **lora})  # type: ignore[arg-type]
        adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.lora={dict(lora)}: {error}") from error
    return adapted


def check_fit(model: Any, data: HFData) -> None:
    """
    Args:
        model: of transformers, whole.
        data: set up.

    Raises:
        ValueError: the data have tokens that the model doesn't know; or share rows among documents, and the model lets
            one document see another.
    """
    known = model.get_input_embeddings().num_embeddings
    if data.vocabulary > known:
        raise ValueError(
            f"data.tokenizer={data.tokenizer}: it has {data.vocabulary} tokens, and the model knows {known}: name the "
            f"folder of the model's own tokenizer."
        )
    limit = rope_limit(model.config)
    if data.packing and limit is not None and data.context > limit:
        raise ValueError(
            f"data.packing=true: in rows of more than {limit} tokens the positions of this model (rope_type) go by the "
            f"longest document in the batch: use data.packing=false, or data.context={limit}."
        )
    if data.packing and not _keeps_documents_apart(model):
        raise ValueError(
            f"data.packing=true: a {type(model).__name__} lets a document in a row see the ones before it, whatever "
            f"their positions are: use data.packing=false."
        )


def _keeps_documents_apart(model: nn.Module) -> bool:
    """Does what the model says of a document depend on the one before it in the row? It is tried with two."""
    if not takes(model, "position_ids"):
        return False
    lengths = (24, 40)
    row = torch.arange(sum(lengths))[None] % 50
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    other = torch.cat([row[:, : lengths[0]].flip(1), row[:, lengths[0] :]], dim=1)
    modes = {part: part.training for part in model.modules()}
    model.eval()  # draws nothing
    with torch.no_grad():
        said = [model(input_ids=tokens, position_ids=positions, use_cache=False).logits for tokens in (row, other)]
    for part, training in modes.items():
        part.training = training
    one, two = (logits[:, lengths[0] :].float() for logits in said)
    # Experts get the tokens of both documents in one product, which may be rounded otherwise.
    rounding = 4 * torch.finfo(said[0].dtype).eps * one.abs().max()
    return bool((one - two).abs().max() <= max(rounding, 1e-4 * one.abs().max()))


def rope_limit(config: Any) -> int | None:
    """The length up to which each token's position is its own: beyond it, some models scale positions by the longest
    text in the batch. None for models that don't."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, Mapping))]
    for each in kinds:
        if each.get("rope_type") in ("longrope", "dynamic"):
            known = each.get("original_max_position_embeddings")
            return int(known or config.max_position_embeddings)
    return None


def takes(model: Any, name: str) -> bool:
    """Does the model, below its adapters, have an argument of this name?"""
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in signature(own.forward).parameters


def _outer(model: Any) -> list[nn.Module]:
    """The embeddings and the output layer, which Muon leaves to AdamW."""
    output = model.get_output_embeddings()
    return [part for part in model.modules() if part is output or isinstance(part, nn.Embedding)]
