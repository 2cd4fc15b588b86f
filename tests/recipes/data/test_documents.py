"""recipes/data/documents.py and tokenizer.py: what of a record is learned, in bytes and in tokens of a tokenizer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from recipes.data.documents import IGNORED, Document, reader
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


def test_of_a_conversation_all_answers_are_learned(tmp_path: Path) -> None:
    by = tokenizer_of(str(tokenizer(tmp_path)))
    document = reader(["messages"], None, by)({"messages": MESSAGES[4]})
    assert learned(document, by).split() == ["5", "It", "is", "6."]
    assert by.encode("<|im_end|>", special=False)[0][0] in (document.labels or [])


FORGETS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(("template", "words"), [
    (None, "no template for chats"),
    (FORGETS, "give conversations of one answer each"),
    ("{{ raise_exception('no system') }}", "refuses one: no system"),
])  # fmt: skip
def test_a_conversation_whose_answers_cannot_be_found_is_refused(
    tmp_path: Path, template: str | None, words: str
) -> None:
    by = tokenizer_of(str(tokenizer(tmp_path, template)))
    with pytest.raises(ValueError, match=words):
        reader(["messages"], None, by)({"messages": MESSAGES[0]})


def test_one_answer_is_found_even_where_more_would_be_forgotten(tmp_path: Path) -> None:
    by = tokenizer_of(str(tokenizer(tmp_path, FORGETS)))
    assert learned(reader(["messages"], None, by)({"messages": MESSAGES[4][:2]}), by) == "5"


def test_bytes_know_no_chats() -> None:
    with pytest.raises(ValueError, match="no template for chats: set data.tokenizer"):
        reader(["messages"], None, ByteTokenizer())({"messages": MESSAGES[0]})


@pytest.mark.parametrize(("columns", "column", "record", "words"), [
    (["body"], None, {}, "data.column=null: none of prompt and completion, messages, text is among body"),
    (["body"], "text", {}, "data.column=text: there is none"),
    (["text"], "text", {"text": 5}, "neither a text nor a list of messages"),
])  # fmt: skip
def test_other_columns_are_refused(columns: list[str], column: str | None, record: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reader(columns, column, ByteTokenizer())(record)


def test_another_column_is_read_if_named() -> None:
    assert reader(["id", "body"], "body", ByteTokenizer())({"id": 1, "body": "ab"}).tokens == [97, 98, 0]
