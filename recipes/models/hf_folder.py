"""A model of transformers from a folder, and adapters in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_parallel.checkpoint.agreement import first_few

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
        damaged = ", ".join(_damaged(Path(path))) if isinstance(error, SafetensorError) else ""
        fix = f": {damaged} is not whole, copy it anew" if damaged else ""
        raise ValueError(f"model.path={path}: transformers can't open it: {error}{fix}") from error
    whole: nn.Module = model
    return whole


def _damaged(folder: Path) -> Iterator[str]:
    """The names of files that safetensors can't open: it doesn't say which."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            yield file.name


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
