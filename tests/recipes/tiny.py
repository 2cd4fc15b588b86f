"""What users bring: a tiny model with its tokenizer, files of documents, images. All is made here; nothing is
downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

CHATS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # as ChatML has it
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [f"The sum of {n} and {n + 1} is {2 * n + 1}, and their product {n * (n + 1)}." for n in range(60)]
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
QUESTIONS = [{"prompt": f"{n} + 1 = ", "completion": str(n + 1)} for n in range(60)]
MESSAGES = [
    [
        {"role": "user", "content": f"{n} + 1?"},
        {"role": "assistant", "content": f"{n + 1}"},
        {"role": "user", "content": "And one more?"},
        {"role": "assistant", "content": f"It is {n + 2}."},
    ]
    for n in range(60)
]


def tokenizer(folder: Path, template: str = CHATS) -> Path:
    """A tokenizer of bytes and pairs of them, of about 300 tokens."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    pairs.train_from_iterator(TEXTS, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=SPECIAL[0])
    whole.chat_template = template
    whole.save_pretrained(folder)
    return folder


def lines(file: Path, records: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def texts(file: Path) -> Path:
    return lines(file, [{"text": text} for text in TEXTS])


def chats(file: Path) -> Path:
    return lines(file, [{"messages": messages} for messages in MESSAGES])


def questions(file: Path) -> Path:
    return lines(file, [dict(question) for question in QUESTIONS])


def model(folder: Path, config: Any = None, longest: int = 64) -> Path:
    """A pretrained model with its tokenizer."""
    tokenizer(folder)
    torch.manual_seed(3)
    config = config or LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=0, max_position_embeddings=longest)
    AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)
    return folder


def images(folder: Path, classes: int = 4, each: int = 10, size: int = 16) -> Path:
    """scikit-learn's digits as files, a folder for each class."""
    from sklearn.datasets import load_digits  # takes seconds: only in the worker that needs it

    pixels, labels = load_digits(return_X_y=True)
    for label in range(classes):
        (folder / f"digit-{label}").mkdir(parents=True)
        for number, image in enumerate(pixels[labels == label][:each]):
            grey = Image.fromarray((image.reshape(8, 8) * 15.9).astype(np.uint8))
            grey.resize((size + 4, size)).save(folder / f"digit-{label}" / f"{number:04}.png")
    return folder
