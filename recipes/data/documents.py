"""A record of a data file becomes a document: tokens, and which of them a model is to learn.

::

    {"text": ...}                                         all of it
    {"prompt": ..., "completion": ...}                    the completion
    {"messages": [{"role": ..., "content": ...}, ...]}    what the assistant says, by the tokenizer's template for chats
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.data.tokenizer import Messages, Tokenizer

IGNORED = -100  # the label of a token that isn't learned, as torch's cross entropy has it


@dataclass(frozen=True)
class Document:
    """
    Attributes:
        tokens: all of them.
        labels: the token, or IGNORED; None if all are learned, and the document may be cut anywhere.
    """

    tokens: list[int]
    labels: list[int] | None = None


Reader = Callable[[Mapping[str, Any]], Document]


def reader(columns: Collection[str], column: str | None, tokenizer: Tokenizer) -> Reader:
    """What makes documents of records.

    Args:
        columns: of the records.
        column: the one to read, with texts or conversations; None finds it by its name.
        tokenizer: of the model.

    Raises:
        ValueError: there is no such column.
    """
    if column is None and {"prompt", "completion"} <= set(columns):
        return lambda record: _answered(record["prompt"], record["completion"], tokenizer)
    chosen = column or next((name for name in ("messages", "text") if name in columns), None)
    known = ", ".join(sorted(columns))
    if chosen is None:
        raise ValueError(f"data.column=null: none of prompt and completion, messages, text is among {known}: name one.")
    if chosen not in columns:
        raise ValueError(f"data.column={column}: there is none of this name among {known}: name one of them.")

    def read(record: Mapping[str, Any]) -> Document:
        value = record[chosen]
        if isinstance(value, str):
            return Document(_ended(tokenizer.encode(value)[0], tokenizer))
        if isinstance(value, list):
            return _conversation(value, tokenizer)
        raise ValueError(f"data.column={chosen}: {value!r} is neither a text nor a list of messages.")

    return read


def _ended(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    ends = tokenizer.end is None or tokens[-1:] == [tokenizer.end]
    return tokens if ends else [*tokens, tokenizer.end]  # type: ignore[list-item]


def _answered(prompt: Any, answer: Any, tokenizer: Tokenizer) -> Document:
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        raise ValueError("its prompt or its completion is no text.")
    tokens, places = tokenizer.encode(prompt + answer)
    ended = _ended(tokens, tokenizer)  # its end is learned, too
    return _learned(ended, [*places, len(prompt)][: len(ended)], [(len(prompt), len(prompt + answer) + 1)])


def _conversation(messages: Messages, tokenizer: Tokenizer) -> Document:
    """The answers in it are found in its text: what a message of the assistant adds to the messages before it."""
    if not messages or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages):
        raise ValueError("its messages need a role each, and content.")
    whole = tokenizer.chat(messages)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError("it begins with the assistant: give it a message before.")
        before = tokenizer.chat(messages[:number], answering=True)
        through = tokenizer.chat(messages[: number + 1])
        if not (through.startswith(before) and whole.startswith(through)):
            raise ValueError(
                "The tokenizer's template for chats writes an answer otherwise when more messages follow, so the "
                "answers can't be told from the rest: give conversations of one answer each."
            )
        spans.append((len(before), len(through)))
    tokens, places = tokenizer.encode(whole, special=False)  # the template has written the special ones
    return _learned(tokens, places, spans)


def _learned(tokens: list[int], places: list[int], spans: list[tuple[int, int]]) -> Document:
    """A document of which the tokens that begin in some parts of the text are learned."""
    learned = (any(begin <= place < end for begin, end in spans) for place in places)
    return Document(tokens, [token if counts else IGNORED for token, counts in zip(tokens, learned, strict=True)])
