"""Documents of the user's own, as the tokens of a model of transformers."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from recipes.data.base import HELD_OUT, SeededData
from recipes.data.documents import IGNORED, KINDS, Document, Reader, files_of, problem, reader
from recipes.data.rows import CountedRows, CountingSampler, learns, rows_of
from recipes.data.tokenizer import files_of_tokenizer, tokenizer_of

_FORMAT = 3  # of the rows: a change makes what was prepared before out of date
_COUNT = "count"  # a column of the rows
_AT_A_TIME = 1000  # documents


class HFData(SeededData):
    """Rows of tokens, made of files by ``datasets`` and the model's tokenizer. They are made once, and kept.

    A batch is a dictionary of int64 tensors [batch, context]: ``input_ids``, ``labels`` (-100 for what isn't learned),
    and ``position_ids`` or, without packing, ``attention_mask``; and ``labels_in_batch`` [batch]
    (:mod:`recipes.data.rows`). conf/data/hf.yaml says what the settings mean, :mod:`recipes.data.documents` which
    columns documents have.

    Attributes:
        vocabulary: the number of tokens. Known after ``setup``.

    Raises:
        ValueError: the files hold no such documents, or too few; names the setting and the fix.
    """

    def __init__(
        self,
        *,
        path: str,
        directory: str,
        val_path: str | None = None,
        tokenizer: str | None = None,
        column: str | None = None,
        context: int = 512,
        packing: bool = True,
        batch_size: int = 8,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, seed)
        self.path, self.val_path = Path(path), None if val_path is None else Path(val_path)
        self.directory = Path(directory)
        self.tokenizer, self.column = tokenizer, column
        self.context, self.packing = context, packing
        self.vocabulary: int

    def prepare_data(self) -> None:
        for path in filter(None, (self.path, self.val_path)):
            self._rows(path)

    def setup(self, stage: str) -> None:
        self.vocabulary = tokenizer_of(self.tokenizer).size
        self.fingerprint = f"{self.path.name} sha256:{_hash(files_of(self.path))}"
        rows = self._rows(self.path)
        if self.val_path is not None:
            self.train_set = _counted(rows)
            self.val_set = self.test_set = _counted(self._rows(self.val_path))
            return
        held_out = len(rows) // HELD_OUT
        if held_out == 0:
            raise ValueError(
                f"data.path={self.path}: {len(rows)} rows of data.context={self.context} tokens are too few to hold "
                f"one in {HELD_OUT} out for validation: give more documents, a smaller context, or data.val_path."
            )
        val, test = len(rows) - 2 * held_out, len(rows) - held_out
        self.train_set = _counted(rows.select(range(val)))
        self.val_set = _counted(rows.select(range(val, test)))
        self.test_set = _counted(rows.select(range(test, len(rows))))

    def _sampler(self, dataset: Any, order: dict[str, Any]) -> CountingSampler:
        return CountingSampler(dataset, self.batch_size, **order)

    def _rows(self, path: Path) -> Any:
        """The rows of a path, from the disk if they have been made before; a ``datasets.Dataset``."""
        import datasets

        found = problem(str(path))
        if found is not None:
            raise ValueError(f"data.path={path}: {found[0]}; {found[1]}")
        files = files_of(path)
        kind = KINDS[files[0].suffix]
        more = {"sample_by": "document"} if kind == "text" else {}
        content = _hash(files)  # datasets' own key is of names and times alone
        tokenizer = tokenizer_of(self.tokenizer)
        datasets.disable_progress_bars()
        try:
            given, kept = [glob.escape(str(file)) for file in files], str(self.directory / "datasets" / content)
            records = datasets.load_dataset(kind, data_files=given, split="train", cache_dir=kept, **more)
        except (datasets.exceptions.DatasetsError, ValueError, StopIteration) as error:  # several, for one cause
            raise ValueError(f"data.path={path}: datasets can't read it: {error.__cause__ or error}") from error
        try:
            read = reader(records.column_names, self.column, tokenizer)
        except ValueError as error:
            raise ValueError(f"data.path={path}: {error}") from error

        def columns(batch: Mapping[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
            documents = [_read(read, each, n, path) for each, n in zip(_records(batch), numbers, strict=True)]
            return _columns_of(documents, self.context, tokenizer.padding, self.packing)

        # A thousand documents at a time, of which the last row is filled up.
        try:
            rows = records.map(
                columns,
                with_indices=True,
                batched=True,
                batch_size=_AT_A_TIME,
                remove_columns=records.column_names,
                new_fingerprint=self._key(content),
            )
        except UnicodeDecodeError as error:  # JSON's strings are looked at only here
            raise ValueError(f"data.path={path}: {error}: convert the files to UTF-8") from error
        if len(rows) == 0:
            raise ValueError(f"data.path={path}: nothing in it is to be learned: give documents with text in them.")
        return rows.with_format("torch")

    def _key(self, content: str) -> str:
        """What rows depend on."""
        tokens = _hash(files_of_tokenizer(self.tokenizer))
        text = json.dumps([_FORMAT, content, tokens, self.column, self.context, self.packing])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _hash(files: Iterable[Path]) -> str:
    """Of the files' content."""
    content = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content.update(hashlib.file_digest(stream, "sha256").digest())
    return content.hexdigest()


def _read(read: Reader, record: Mapping[str, Any], number: int, path: Path) -> Document:
    try:
        return read(record)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        said = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
        where = f"document {number + 1}, counted from 1 through all files,"
        raise ValueError(f"data.path={path}: {where} can't be read: {said}") from error


def _records(batch: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _columns_of(documents: list[Document], context: int, padding: int, packing: bool) -> dict[str, list[Any]]:
    """The columns of the documents' rows, with the number of labels of each."""
    too_long = sum(document.labels is not None and len(document.tokens) > context for document in documents)
    if too_long:
        rank_zero_warn(
            f"{too_long} of {len(documents)} documents with answers are longer than data.context={context} tokens. "
            f"What is over is left out."
        )
    teaching = [document for document in documents if any(label != IGNORED for label in document.learned[1:])]
    if len(teaching) < len(documents):
        rank_zero_warn(
            f"{len(documents) - len(teaching)} of {len(documents)} documents are left out: no text is in them, or "
            f"nothing that the assistant says."
        )
    rows = [row for row in rows_of(teaching, context, padding, packed=packing) if learns(row)]
    names = ("input_ids", "labels", "position_ids" if packing else "attention_mask")
    counts = [sum(label != IGNORED for label in row["labels"][1:]) for row in rows]
    return {**{name: [row[name] for row in rows] for name in names}, _COUNT: counts}


def _counted(rows: Any) -> CountedRows:
    counts = rows.with_format(None)[_COUNT]
    return CountedRows(rows.remove_columns(_COUNT), list(counts))
