"""Files of documents. A record becomes a document: tokens, and which of them a model is to learn.

::

    {"text": ...}                                         all of it
    {"prompt": ..., "completion": ...}                    the completion
    {"messages": [{"role": ..., "content": ...}, ...]}    what the assistant says, by the tokenizer's template for chats

An empty text, and a conversation in which the assistant says nothing, have no tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from recipes.data.tokenizer import Messages, Tokenizer

IGNORED = -100  # the label of a token that isn't learned, as torch's cross entropy has it
_OTHER = "\ue000"  # in the place of what a message says: a character for private use, which texts don't have
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}  # suffix -> loader of datasets'


@dataclass(frozen=True)
class Document:
    """
    Attributes:
        tokens: all of them.
        labels: the token, or IGNORED; None if all are learned, and the document may be cut anywhere.
    """

    tokens: list[int]
    labels: list[int] | None = None

    @property
    def learned(self) -> list[int]:
        """The labels, also if all are learned."""
        return self.tokens if self.labels is None else self.labels


Reader = Callable[[Mapping[str, Any]], Document]


def reader(columns: Collection[str], column: str | None, tokenizer: Tokenizer) -> Reader:
    """What makes documents of records with these columns. None finds the column by its name.

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
            return Document(_ended(tokenizer.encode(value)[0], tokenizer) if value.strip() else [])
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
    """The answers in it are found in its text: what differs if a message of the assistant says something else. What
    the template writes when the assistant is about to answer is not learned; the token that ends an answer is."""
    if not messages or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages):
        raise ValueError("its messages need a role each, and content.")
    answers = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
    if not answers:
        return Document([])
    whole = tokenizer.chat(messages)
    tokens, places = tokenizer.encode(whole, special=False)  # the template has written the special ones
    opening = _opening(messages[: answers[0]] or messages, tokenizer)
    said = [(number, *_said(messages, number, whole, tokenizer)) for number in range(len(messages))]
    there = [place for place in said if place[1] < len(whole)]  # a template may leave out what others say
    spans, before = [], 0
    for (number, begin, end), (_, limit, _) in pairwise([*there, (len(messages), len(whole), len(whole))]):
        if not before <= begin <= end <= limit:
            raise ValueError(
                f"the tokenizer's template for chats writes message {number + 1} in several places, or not after the "
                f"one before."
            )
        if number in answers:
            opened = whole.rfind(opening, before, begin) if opening else -1
            begin = opened + len(opening) if opened >= 0 else begin
            first = bisect_right(places, begin) - 1  # the token in which it begins
            spans.append((places[max(first, 0)], _closed(tokens, places, end, limit, tokenizer)))
        before = end
    return _learned(tokens, places, spans)


def _opening(messages: Messages, tokenizer: Tokenizer) -> str:
    """What a template writes when the assistant is about to answer."""
    without, opened = tokenizer.chat(messages), tokenizer.chat(messages, answering=True)
    return opened[_alike(without, opened) :]


def _said(messages: Messages, number: int, whole: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Where a message is in the text of all of them: from its first character to the one after its last. At the end if
    it is nowhere.

    Raises:
        ValueError: it is the assistant's, and nowhere.
    """
    message = messages[number]
    other = {"role": "assistant"} if message["role"] == "assistant" else dict(message)  # without thoughts and calls
    text = tokenizer.chat([*messages[:number], {**other, "content": _OTHER}, *messages[number + 1 :]])
    if text == whole and message["role"] == "assistant":
        raise ValueError(
            f"the tokenizer's template for chats leaves out what the assistant says in message {number + 1}: give "
            f"conversations of one answer each."
        )
    begin = _alike(whole, text)
    return begin, len(whole) - _alike(whole[begin:][::-1], text[begin:][::-1])


def _alike(one: str, two: str) -> int:
    """With how many characters both begin."""
    return bisect_left(range(min(len(one), len(two))), True, key=lambda last: one[: last + 1] != two[: last + 1])


def _closed(tokens: list[int], places: list[int], end: int, limit: int, tokenizer: Tokenizer) -> int:
    """Where an answer's last token ends: the special one that follows, as <|im_end|> does, before the next message."""
    later = (number for number, place in enumerate(places) if end <= place < limit)
    found = next((number for number in later if tokens[number] in tokenizer.special_tokens), None)
    return end if found is None else places[found] + 1


def _learned(tokens: list[int], places: list[int], spans: list[tuple[int, int]]) -> Document:
    """A document of which the tokens that begin in some parts of the text are learned."""
    learned = (any(begin <= place < end for begin, end in spans) for place in places)
    return Document(tokens, [token if counts else IGNORED for token, counts in zip(tokens, learned, strict=True)])


def files_of(path: Path) -> list[Path]:
    """The files of documents that a path stands for: itself, or those below a folder, sorted."""
    if path.is_file():
        return [path]
    inside = (file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix in KINDS)
    return [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def problem(path: str | None) -> tuple[str, str] | None:
    """What is wrong with a path of documents and how to put it right; None if they can be read."""
    fix = f"give a file, or a folder with files, of one kind of {', '.join(KINDS)}"
    if path is None:
        return "no file is given", fix
    if not Path(path).exists():
        return "no such file or folder", f"{fix} (relative names count from {Path.cwd()})"
    files = files_of(Path(path))
    if not files or files[0].suffix not in KINDS:
        return "no documents there", fix
    suffixes = sorted({file.suffix for file in files})
    if len({KINDS[suffix] for suffix in suffixes}) > 1:
        return f"files of several kinds, {', '.join(suffixes)}", fix
    if not any(file.stat().st_size for file in files):
        return "nothing is in it", fix
    chained = next((file for file in files if "::" in str(file)), None)
    if chained is not None:
        return f"datasets would read {chained} as a chain of files", "give it a name without ::"
    return None
