"""Documents become rows of equal length: packed, several in a row, or each in rows of its own.

::

    packed, texts            a a a a a b b b | b b b b c c c c | ...           cut where a row is full
    packed, answers          a a a a a . . . | b b b b b c c . | ...           not cut: a question belongs to its answer
    one document a row       a a a a a . . . | b b b b b b b . | c c c c . . . .

In a packed row the positions begin again with each document, so that a model whose attention goes by them keeps
documents apart, and no document's first token is learned. The padding is a document of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from recipes.data.documents import IGNORED, Document

Row = dict[str, list[int]]


@dataclass
class _Open:
    """A row that isn't full."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], labels: list[int]) -> None:
        self.tokens += tokens
        self.labels += [IGNORED, *labels[1:]]
        self.positions += range(len(tokens))


def rows_of(documents: Iterable[Document], context: int, padding: int, *, packed: bool) -> Iterator[Row]:
    """Rows of ``context`` tokens each, of documents in order. What of a document with answers is longer than a row is
    left out. Packed rows have ``input_ids``, ``labels`` and ``position_ids``, others ``attention_mask`` in place of the
    last.
    """
    row = _Open()
    for document in documents:
        tokens = document.tokens if document.labels is None else document.tokens[:context]
        labels = document.learned
        whole = not packed or document.labels is not None
        if row.tokens and whole and (not packed or len(tokens) > context - len(row.tokens)):
            yield _closed(row, context, padding, packed)
            row = _Open()
        while tokens:
            room = context - len(row.tokens)
            row.add(tokens[:room], labels[:room])
            tokens, labels = tokens[room:], labels[room:]
            if len(row.tokens) == context:
                yield _closed(row, context, padding, packed)
                row = _Open()
    if row.tokens:
        yield _closed(row, context, padding, packed)


def _closed(row: _Open, context: int, padding: int, packed: bool) -> Row:
    length = len(row.tokens)
    if length < context:
        row.add([padding] * (context - length), [IGNORED] * (context - length))
    closed = {"input_ids": row.tokens, "labels": row.labels}
    if packed:
        return closed | {"position_ids": row.positions}
    return closed | {"attention_mask": [1] * length + [0] * (context - length)}


def learns(row: Row) -> bool:
    """Has it a label besides its first one, which nothing comes before?"""
    return any(label != IGNORED for label in row["labels"][1:])
