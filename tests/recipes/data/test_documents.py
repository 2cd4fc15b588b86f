"""recipes/data/documents.py, tokenizer.py, rows.py: what of a record is learned, in bytes and in a tokenizer's tokens.
Nothing of a document is lost or seen twice, and a row tells its documents apart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from recipes.data.documents import IGNORED, Document, files_of, problem, reader
from recipes.data.rows import CountedRows, CountingSampler, learns, rows_of
from recipes.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_of
from tests.recipes.tiny import MESSAGES, tokenizer


def learned(document: Document, by: Tokenizer) -> str:
    assert document.labels is not None
    assert all(label in (token, IGNORED) for label, token in zip(document.labels, document.tokens, strict=True))
    return by.decode([label for label in document.labels if label != IGNORED])


@pytest.fixture(params=["bytes", "tokenizer"])
def by(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return tokenizer_of(None if request.param == "bytes" else str(tokenizer(tmp_path / "model")))


@pytest.mark.parametrize("text", ["plain", "with ünïcode, 漢字 and 🙂", "line\n\n  break"])
def test_a_text_comes_back_and_is_learned_whole(by: Tokenizer, text: str) -> None:
    document = reader(["text"], None, by)({"text": text})
    assert document.labels is None and document.tokens[-1] == by.end
    assert by.decode(document.tokens) == text
    assert max(document.tokens) < by.size


@pytest.mark.parametrize("prompt", ["1 + 1 = ", "漢字 🙂 "])
def test_of_a_prompt_and_its_completion_the_second_is_learned(by: Tokenizer, prompt: str) -> None:
    document = reader(["prompt", "completion"], None, by)({"prompt": prompt, "completion": "twö"})
    assert learned(document, by) == "twö"
    assert document.labels is not None and document.labels[-1] == by.end
    assert by.decode(document.tokens) == f"{prompt}twö"


def test_an_end_that_the_tokenizer_writes_itself_is_learned_too(tmp_path: Path) -> None:
    by: Any = tokenizer_of(str(tokenizer(tmp_path)))
    by._own._tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A <|end|>", special_tokens=[
        ("<|im_start|>", 1), ("<|end|>", 0),
    ])  # fmt: skip
    document = reader(["prompt", "completion"], None, by)({"prompt": "1 + 1 = ", "completion": "2"})
    assert document.labels is not None and document.labels.count(0) == 1 and document.labels[-1] == 0
    assert document.labels[0] == IGNORED and document.tokens[0] == 1


SHAPES = {  # of templates that people have, in this tokenizer's words, and what is learned of two answers
    "qwen3": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and "
        "loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "5<|im_end|><think>\n\n</think>\n\nIt is 6.<|im_end|>",
    ),
    "phi-3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|end|>{% endif %}",
        "5<|im_end|>It is 6.<|im_end|>",
    ),
    "r1-distill": (
        "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% else %}[A]{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[A]<think>\n{% endif %}",
        "5<|end|>It is 6.<|end|>",
    ),
    "without special tokens": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        " 5It is 6.",  # the token of the answer begins before it
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_found_whatever_the_template_makes_of_them(tmp_path: Path, shape: str) -> None:
    template, expected = SHAPES[shape]
    by: Any = tokenizer_of(str(tokenizer(tmp_path, template)))
    read = reader(["messages"], None, by)

    def said(messages: Any) -> str:
        text: str = by._own.decode([label for label in read({"messages": messages}).labels or [] if label != IGNORED])
        return text

    assert said(MESSAGES[4]) == expected
    assert said(MESSAGES[4][:2]).count("5") == 1


def test_thoughts_and_calls_belong_to_an_answer(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
        "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    by = tokenizer_of(str(tokenizer(tmp_path, template)))
    answer = {"role": "assistant", "thinking": "4 and 1", "content": "", "tool_calls": ["add(4, 1)"]}
    messages = [MESSAGES[4][0], answer, {"role": "tool", "content": "5"}, {"role": "assistant", "content": "5."}]
    document = reader(["messages"], None, by)({"messages": messages})
    assert learned(document, by) == "<think>4 and 1</think><call>add(4, 1)</call>5."


def test_what_teaches_nothing_has_no_tokens(by: Tokenizer) -> None:
    assert reader(["text"], None, by)({"text": " \n"}).tokens == []
    assert reader(["messages"], None, by)({"messages": MESSAGES[0][:1]}).tokens == []


FORGETS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(("template", "words"), [
    ("", "no template for chats"), (None, "no template for chats: set data.tokenizer"),  # bytes know no chats
    (FORGETS, "give conversations of one answer each"),
    ("{{ raise_exception('no system') }}", "refuses one: no system"),
    ("{% for m in messages + messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "message 1 in several places"),
])  # fmt: skip
def test_a_conversation_whose_answers_cannot_be_found_is_refused(
    tmp_path: Path, template: str | None, words: str
) -> None:
    by = tokenizer_of(None if template is None else str(tokenizer(tmp_path, template)))
    with pytest.raises(ValueError, match=words):
        reader(["messages"], None, by)({"messages": MESSAGES[0]})


@pytest.mark.parametrize(("columns", "column", "record", "words"), [
    (["body"], None, {}, "data.column=null: none of prompt and completion, messages, text is among body"),
    (["body"], "text", {}, "data.column=text: there is none"),
    (["text"], "text", {"text": 5}, "neither a text nor a list of messages"),
])  # fmt: skip
def test_other_columns_are_refused(columns: list[str], column: str | None, record: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reader(columns, column, ByteTokenizer())(record)


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a")
    return folder


def test_a_folder_stands_for_its_documents_in_order(tmp_path: Path) -> None:
    made(tmp_path, "b.jsonl", "a/c.json", "notes.md", ".cache/d.jsonl")
    assert [str(file.relative_to(tmp_path)) for file in files_of(tmp_path)] == ["a/c.json", "b.jsonl"]
    assert files_of(tmp_path / "b.jsonl") == [tmp_path / "b.jsonl"]
    assert problem(str(tmp_path)) is None is problem(str(tmp_path / "b.jsonl"))


@pytest.mark.parametrize(("names", "path", "said"), [
    ([], None, "no file is given"),
    ([], "nowhere", "no such file or folder"),
    (["a.md"], "", "no documents there"),
    (["a.md"], "a.md", "no documents there"),
    (["a.txt", "b.parquet"], "", "files of several kinds, .parquet, .txt"),
    (["a::b; c.txt"], "", "as a chain of files"),
])  # fmt: skip
def test_other_paths_are_told_with_what_helps(tmp_path: Path, names: list[str], path: str | None, said: str) -> None:
    found = problem(None if path is None else str(made(tmp_path, *names) / path))
    assert found is not None and said in found[0] and found[1].startswith("give ")


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
    assert not packed or all(PADDING not in row["input_ids"] for row in rows[:-1])


@pytest.mark.parametrize("seed", range(5))
def test_a_document_with_answers_is_in_one_row(seed: int) -> None:
    given = documents(seed, answers=True)
    rows = list(rows_of(given, 16, PADDING, packed=True))
    for document in given:
        row = next(row for row in rows if document.tokens[0] in row["input_ids"])
        place, kept = row["input_ids"].index(document.tokens[0]), document.tokens[:16]
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


def labels_of(batch: list[dict[str, torch.Tensor]]) -> list[int]:
    return sorted(int(label) for row in batch for label in row["labels"] if label != IGNORED)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_learn_what_one_process_does(replicas: int, train: bool, epoch: int) -> None:
    one, several = batches(1, train=train, epoch=epoch), batches(replicas, train=train, epoch=epoch)
    whole = ROWS // 4
    assert [labels_of(batch) for batch in several[:whole]] == [labels_of(batch) for batch in one[:whole]]
    if not train:  # the last batch has two rows
        assert len(several) == len(one) == whole + 1 and labels_of(several[-1]) == labels_of(one[-1])
    for batch in several:
        assert {int(row["labels_in_batch"]) for row in batch} == {len(labels_of(batch))}
