"""Models of transformers with adapters of PEFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import transformers
from torch import nn

from tools.zoo.entry import Entry, Nature
from tools.zoo.modules import CLASSES, OwnLoss
from tools.zoo.pretrained import classification, drop_nothing, language, translation
from tools.zoo.transformers_text import GPT2, T5, WIDE


def adapted(
    name: str,
    model: str,
    config: peft.PeftConfig,
    batch: Callable[[], Any] = language,
    by_nature: Nature | None = None,
    **settings: Any,
) -> Entry:
    def module() -> OwnLoss:
        kind = getattr(transformers, model)
        of_model = kind.config_class(**settings)
        drop_nothing(of_model)
        made: nn.Module = peft.get_peft_model(kind(of_model), config)
        return OwnLoss(made)

    return Entry(name, "peft", module, batch, by_nature=by_nature)


def lora(*targets: str, **settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": list(targets), **settings})


ENTRIES = (
    adapted("gpt2, lora", "GPT2LMHeadModel", lora("c_attn", fan_in_fan_out=True), **GPT2),
    adapted("llama, lora", "LlamaForCausalLM", lora("q_proj", "v_proj"), **WIDE),
    adapted(
        "llama, lora everywhere", "LlamaForCausalLM",
        lora("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), **WIDE,
    ),
    adapted(
        "llama, lora with dropout", "LlamaForCausalLM", lora("q_proj", "v_proj", lora_dropout=0.2),
        by_nature=Nature.DRAWS, **WIDE,
    ),
    adapted("llama, dora", "LlamaForCausalLM", lora("q_proj", "v_proj", use_dora=True), **WIDE),
    adapted("llama, lora and head", "LlamaForCausalLM", lora("q_proj", modules_to_save=["lm_head"]), **WIDE),
    adapted(
        "llama, ia3", "LlamaForCausalLM",
        peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]), **WIDE,
    ),
    adapted(
        "bert, lora", "BertForSequenceClassification", lora("query", "value", modules_to_save=["classifier"]),
        classification, num_labels=CLASSES, **WIDE,
    ),
    adapted("t5, lora", "T5ForConditionalGeneration", lora("q", "v"), translation, **T5),
)  # fmt: skip
