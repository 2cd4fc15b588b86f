"""Text as tokens, and back: by the tokenizer in a model's folder, or as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tiktoken.model", "tekken.json",
)  # fmt: skip
TOKENIZER_FILES = (*_FILES, "added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json")

Messages = Sequence[Mapping[str, Any]]  # each with a role and content


class ByteTokenizer:
    """Each byte of UTF-8 is a token; 0 ends a document.

    Attributes:
        size: tokens are from 0 to this number, exclusively.
        end: the token that ends a document; None for none.
        padding: a token for places that nobody reads.
        special_tokens: those that no text has.
    """

    size, padding, special_tokens = 256, 0, frozenset[int]()
    end: int | None = 0

    def encode(self, text: str, *, special: bool = True) -> tuple[list[int], list[int]]:
        """The tokens, and for each the index of the character with which it begins. With ``special``, those tokens are
        around the text that the model expects."""
        pieces = [character.encode() for character in text]
        places = [[place] * len(piece) for place, piece in enumerate(pieces)]
        return list(b"".join(pieces)), list(chain.from_iterable(places))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return bytes(token for token in tokens if 0 < token < self.size).decode(errors="replace")

    def chat(self, messages: Messages, *, answering: bool = False) -> str:
        """A conversation as the text that the model is used to, up to where it is to answer. ValueError: there is
        no template for chats, or it refuses this one."""
        raise ValueError("bytes have no template for chats: set data.tokenizer to a folder with a tokenizer that has.")


class FolderTokenizer:
    """A tokenizer of transformers, from a folder as ``save_pretrained`` writes it.

    Raises:
        ValueError: transformers can't open it.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        try:
            self._own: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"data.tokenizer={folder}: transformers can't open it: {error}") from error
        if not self._own.is_fast:
            raise ValueError(f"data.tokenizer={folder}: it doesn't tell where tokens begin: use a fast tokenizer.")
        self.size: int = len(self._own)
        self.end: int | None = self._own.eos_token_id
        known = (self._own.pad_token_id, self.end)
        self.padding: int = next((token for token in known if token is not None), 0)
        added = self._own.added_tokens_decoder.items()
        self.special_tokens = frozenset(number for number, token in added if token.special)

    def encode(self, text: str, *, special: bool = True) -> tuple[list[int], list[int]]:
        found = self._own(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        places = [begin for begin, _ in found["offset_mapping"]]
        for number in reversed(range(len(places))):  # special tokens after the text have no place of their own
            if found["offset_mapping"][number][1] > found["offset_mapping"][number][0]:
                break
            places[number] = len(text)
        return found["input_ids"], places

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._own.decode(tokens, skip_special_tokens=True)
        return text

    def chat(self, messages: Messages, *, answering: bool = False) -> str:
        from jinja2 import TemplateError

        if not self._own.chat_template:
            raise ValueError(
                f"data.tokenizer={self._folder}: it has no template for chats: use one with a chat_template."
            )
        try:
            text: str = self._own.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=answering
            )
        except TemplateError as error:
            raise ValueError(f"data.tokenizer={self._folder}: its template for chats refuses one: {error}") from error
        return text


Tokenizer = ByteTokenizer | FolderTokenizer


def tokenizer_of(folder: str | None) -> Tokenizer:
    """The tokenizer in a folder; bytes for None."""
    return ByteTokenizer() if folder is None else FolderTokenizer(Path(folder))


def files_of_tokenizer(folder: str | None) -> list[Path]:
    """What its tokens depend on."""
    return [] if folder is None else [file for name in TOKENIZER_FILES if (file := Path(folder, name)).exists()]


def has_tokenizer(folder: Path) -> bool:
    """Is there a tokenizer in the folder, as far as the names of its files tell?"""
    return any((folder / name).exists() for name in _FILES)
