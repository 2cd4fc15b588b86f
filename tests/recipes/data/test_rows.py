"""recipes/data/rows.py: nothing of a document is lost or seen twice, and a row tells its documents apart."""

from __future__ import annotations

import random

import pytest
import torch

from recipes.data.documents import IGNORED, Document
from recipes.data.rows import CountedRows, CountingSampler, learns, rows_of

PADDING = 0
ROWS = 22


def documents(seed: int, *, answers: bool, longest: int = 40) -> list[Document]:
    """Each with tokens of its own."""
    draw, token = random.Random(seed), 1
    made = []
    for _ in range(30):
        tokens = list(range(token, token := token + draw.randint(1, longest)))
        labels = [each if draw.random() < 0.5 else IGNORED for each in tokens] if answers else None
        made.append(Document(tokens, labels))
    return made


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_texts_are_cut_and_nothing_is_lost(seed: int, packed: bool) -> None:
    given = documents(seed, answers=False)
    rows = list(rows_of(given, 16, PADDING, packed=packed))
    assert all(len(values) == 16 for row in rows for values in row.values())
    kept = [token for row in rows for token in row["input_ids"] if token != PADDING]
    assert kept == [token for document in given for token in document.tokens]
    if packed:
        assert all(PADDING not in row["input_ids"] for row in rows[:-1])


@pytest.mark.parametrize("seed", range(5))
def test_a_document_with_answers_is_in_one_row(seed: int) -> None:
    given = documents(seed, answers=True)
    rows = list(rows_of(given, 16, PADDING, packed=True))
    for document in given:
        begin = document.tokens[0]
        row = next(row for row in rows if begin in row["input_ids"])
        place = row["input_ids"].index(begin)
        kept = document.tokens[:16]
        assert row["input_ids"][place : place + len(kept)] == kept
        assert row["labels"][place + 1 : place + len(kept)] == (document.labels or [])[1 : len(kept)]


@pytest.mark.parametrize("answers", [True, False])
def test_positions_begin_again_with_each_document_whose_first_token_is_not_learned(answers: bool) -> None:
    given = documents(1, answers=answers)
    firsts = {document.tokens[0] for document in given}
    for row in rows_of(given, 16, PADDING, packed=True):
        columns = zip(row["input_ids"], row["labels"], row["position_ids"], strict=True)
        for place, (token, label, position) in enumerate(columns):
            begins = token in firsts or place == 0 or (token == PADDING and row["input_ids"][place - 1] != PADDING)
            assert (position == 0) == begins
            assert label == IGNORED if begins or token == PADDING else label in (token, IGNORED)


def test_a_row_of_its_own_has_a_mask_over_its_padding() -> None:
    rows = list(rows_of([Document([5, 6, 7]), Document([8] * 5)], 4, PADDING, packed=False))
    assert [row["input_ids"] for row in rows] == [[5, 6, 7, 0], [8, 8, 8, 8], [8, 0, 0, 0]]
    assert [row["attention_mask"] for row in rows] == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert rows[0]["labels"] == [IGNORED, 6, 7, IGNORED]
    assert [learns(row) for row in rows] == [True, True, False]


def rows() -> CountedRows:
    counts = [(7 * number) % 5 for number in range(ROWS)]
    plain = [{"labels": torch.tensor([IGNORED] * (5 - n) + [number] * n)} for number, n in enumerate(counts)]
    return CountedRows(plain, counts)


def batches(replicas: int, *, train: bool, epoch: int = 0) -> list[list[dict[str, torch.Tensor]]]:
    """Of four rows over all replicas."""
    data, found = rows(), []
    for rank in range(replicas):
        sampler = CountingSampler(data, 4, num_replicas=replicas, rank=rank, shuffle=train, seed=3, drop_last=train)
        sampler.set_epoch(epoch)
        places, each = list(sampler), 4 // replicas
        assert len(places) == len(sampler)
        found.append([[data[place] for place in places[i : i + each]] for i in range(0, len(places), each)])
    return [[row for part in parts for row in part] for parts in zip(*found, strict=True)]


def learned(batch: list[dict[str, torch.Tensor]]) -> list[int]:
    return sorted(int(label) for row in batch for label in row["labels"] if label != IGNORED)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_learn_what_one_process_does(replicas: int, train: bool, epoch: int) -> None:
    one, several = batches(1, train=train, epoch=epoch), batches(replicas, train=train, epoch=epoch)
    whole = ROWS // 4
    assert [learned(batch) for batch in several[:whole]] == [learned(batch) for batch in one[:whole]]
    if not train:  # the last batch has two rows
        assert len(several) == len(one) == whole + 1 and learned(several[-1]) == learned(one[-1])
    for batch in several:
        assert {int(row["labels_in_batch"]) for row in batch} == {len(learned(batch))}
