"""A model of transformers from a folder, adapters in it, and whether it can be trained on rows of documents."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from lightning_parallel.absent.tensor import AbsentTensor
from lightning_parallel.values import first_few

_READ = ("*.safetensors", "pytorch_model*.bin", "*.index.json")  # files of weights that transformers reads, and lists
_OTHERS = frozenset({".gguf", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".npz", ".onnx"})
_ROUNDED = (torch.bfloat16, torch.float16)
WEIGHTS = _OTHERS | {".safetensors", ".bin"}  # suffixes of files of weights


def opened(path: str) -> nn.Module:
    """The folder's model, in the dtype in which it is stored, its files mapped into memory.

    Raises:
        ValueError: transformers can't open it, or not all weights are there.
    """
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
    whole: nn.Module = model
    return whole


class _WithoutMemory(TorchFunctionMode):
    """Inside, weights have no memory. Constants have."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **{**(kwargs or {}), **more})


def give_exact_buffers(model: nn.Module) -> None:
    """Make constants that no file holds exact, such as the number by which Gemma scales its embeddings. transformers
    rounds them to the dtype of the files, in which the weights are not kept."""
    from transformers import AutoModelForCausalLM

    own = without_adapters(model)
    kept = own.state_dict().keys()
    rounded = [name for name, value in own.named_buffers() if name not in kept and value.dtype in _ROUNDED]
    if not rounded:
        return
    with _WithoutMemory():
        new = AutoModelForCausalLM.from_config(copy.deepcopy(own.config), dtype=torch.float64)
    exact = dict(new.named_buffers())
    for name in rounded:
        value = exact[name.replace(".base_layer", "")]  # of a module that has adapters
        if not value.is_meta:
            part, _, short = name.rpartition(".")
            setattr(own.get_submodule(part), short, value)


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


def with_adapters(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    """The model with adapters of PEFT's, which alone are trained.

    Raises:
        ValueError: ``lora`` has other arguments than ``LoraConfig``, or fits nothing in the model.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    try:
        if isinstance(lora.get("init_lora_weights"), str):
            model.float()  # some of these change the weights, too
        config = LoraConfig(**{"task_type": TaskType.CAUSAL_LM, **lora})  # type: ignore[arg-type]
        adapted: nn.Module = get_peft_model(model, config)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.lora={dict(lora)}: {error}") from error
    return adapted


def takes(model: Any, name: str) -> bool:
    """Does the model, below its adapters, have an argument of this name?"""
    return name in signature(without_adapters(model).forward).parameters


def without_adapters(model: Any) -> Any:
    """The model of transformers that PEFT has put its adapters into, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_fit(model: Any, data: Any) -> None:
    """Refuse data (an HFData, set up) that a whole model of transformers can't be trained on.

    Raises:
        ValueError: the data have tokens that the model doesn't know; or documents share rows, and the model lets one
            document see another, or has positions that go by the longest one.
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
    """Is what the model says of a document the same, whatever document is before it in the row? It is tried with two
    rows that differ in the first document only."""
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
