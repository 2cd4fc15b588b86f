"""recipes/data/hf.py: files become rows once, and train a model as in one process, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, LlamaConfig

from recipes import record
from recipes.data.documents import IGNORED, Document
from recipes.data.hf import HFData
from recipes.data.rows import rows_of
from recipes.models.hf import CausalLM
from tests.recipes.runs import attach, refused, trained
from tests.recipes.tiny import SIZES, TEXTS, chats, lines, model, questions, texts, tokenizer
from tests.thorough import thorough
from tools.workers.pool import WorkerPool


def rows(counted: Any) -> list[dict[str, Any]]:
    return [counted.rows[number] for number in range(len(counted))]


def data(tmp_path: Path, file: Path, **more: Any) -> HFData:
    made = HFData(path=str(file), directory=str(tmp_path / "kept"), **{"context": 32, "batch_size": 2, **more})
    made.prepare_data()
    made.setup("fit")
    return made


def parquet(file: Path, records: list[dict[str, Any]]) -> None:
    from datasets import Dataset  # takes seconds: only in the worker that needs it

    Dataset.from_list(records).to_parquet(file)


EXACT = 1e-12  # float64


# -- files -----------------------------------------------------------------------------------------------------------


def test_jsonl_parquet_and_text_hold_the_same(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", [{"text": text} for text in TEXTS])
    for number, text in enumerate(TEXTS):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / f"{number:03}.txt").write_text(text)
    kinds = [texts(tmp_path / "b.jsonl"), tmp_path / "a.parquet", tmp_path / "c"]
    first, *others = [[row["input_ids"].tolist() for row in rows(data(tmp_path, file).train_set)] for file in kinds]
    assert len(first) > 20 and all(each == first for each in others)


def test_rows_are_made_once_and_anew_for_other_settings_and_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = texts(tmp_path / "a.jsonl")
    before = rows(data(tmp_path, file).train_set)[0]
    monkeypatch.setattr("recipes.data.hf.rows_of", lambda *args, **kwargs: 1 / 0)
    assert torch.equal(rows(data(tmp_path, file).train_set)[0]["input_ids"], before["input_ids"])
    for change in ({"context": 16}, {"packing": False}, {"tokenizer": str(tokenizer(tmp_path / "t"))}):
        with pytest.raises(ZeroDivisionError):
            data(tmp_path, file, **change)
    lines(file, [{"text": "something else"}] * 60)
    with pytest.raises(ZeroDivisionError):
        data(tmp_path, file)


def test_validation_has_documents_of_its_own_or_the_last_ones(tmp_path: Path) -> None:
    file = texts(tmp_path / "a.jsonl")
    own = data(tmp_path, file)
    splits = (own.train_set, own.val_set, own.test_set)
    train, val, test = ([row["input_ids"].tolist() for row in rows(each)] for each in splits)
    sizes = [len(train), len(val), len(test)]
    assert sizes[1] == sizes[2] == sum(sizes) // 20 > 0
    assert train + val + test == [row["input_ids"].tolist() for row in own._rows(file)]
    given = data(tmp_path, file, val_path=str(questions(tmp_path / "b.jsonl")))
    assert len(given.train_set) == sum(sizes)  # type: ignore[arg-type]
    assert bytes(rows(given.val_set)[0]["input_ids"].tolist()).startswith(b"0 + 1 = 1\x001 + 1 = 2\x00")


def test_documents_that_are_too_long_for_a_row_or_teach_nothing_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="60 of 60 documents with answers are longer than data.context=4 tokens"):
        data(tmp_path, lines(tmp_path / "a.jsonl", [{"prompt": "1", "completion": "23456"}] * 60), context=4)
    with pytest.warns(UserWarning, match="7 of 67 documents are left out"):
        data(tmp_path, lines(tmp_path / "b.jsonl", [{"text": text} for text in [*TEXTS, *[" "] * 7]]))


@pytest.mark.parametrize(("content", "words"), [
    ('{"text": "a"}\n', "1 rows of data.context=32 tokens are too few"),
    ('{"text": ""}\n', "nothing in it is to be learned"),
    ('{"other": "a"}\n', "none of prompt and completion, messages, text is among other"),
    ("", "nothing is in it"),
    ("\n\n", "corresponds to no data"),
    ('{"text": "a"}\n\n{"text": "b', "can't read it"),
    ('{"text": "a"}\n{"text": "\xe9"}\n', "'utf-8' codec can't decode"),
])  # fmt: skip
def test_files_that_cannot_be_used_are_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"data.path={tmp_path}/a.jsonl: .*{words}"):
        data(tmp_path, tmp_path / "a.jsonl")


@pytest.mark.parametrize("record", [
    {"messages": [{"from": "human", "value": "a"}]}, {"messages": []},
    {"prompt": None, "completion": "a"}, {"text": None}, {"text": 5},
], ids=str)  # fmt: skip
def test_a_document_that_cannot_be_read_is_named(tmp_path: Path, record: dict[str, Any]) -> None:
    whole = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    good = {key: whole if key == "messages" else 5 if value == 5 else "x" for key, value in record.items()}
    file = tmp_path / "a.parquet"
    parquet(file, [good] * 3 + [record])
    with pytest.raises(ValueError, match=f"data.path={file}: document [14], .* can't be read"):
        data(tmp_path, file, tokenizer=str(tokenizer(tmp_path / "t")))


# -- settings --------------------------------------------------------------------------------------------------------


def test_bad_paths_are_refused_before_a_worker_starts(tmp_path: Path) -> None:
    given = ["model=hf", f"model.path={model(tmp_path / 'model')}", "data=hf", "data.context=32"]
    file = f"data.path={texts(tmp_path / 'a.jsonl')}"
    assert "no such file or folder" in refused(*given, "data.path=/nowhere")
    assert refused(*given, file, "data.val_path=/nowhere").startswith("data.val_path=")
    for other in ("/nowhere", str(tmp_path)):  # a folder, but without a tokenizer
        assert refused(*given, file, f"data.tokenizer={other}").startswith("data.tokenizer=")
    assert "more than the 64 tokens" in refused(*given, file, "data.context=65")
    assert "takes bytes, but data=hf gives documents" in refused("model=gpt", "data=hf", file)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    module = CausalLM(path=str(model(tmp_path / "model")), optimizer={})
    module.model.resize_token_embeddings(290)
    file = texts(tmp_path / "a.jsonl")
    attach(module, data(tmp_path, file, tokenizer=str(tmp_path / "model")))
    with pytest.raises(ValueError, match="it has 300 tokens, and the model knows 290"):
        module.setup("fit")


def test_a_model_that_lets_documents_see_each_other_is_refused(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)
    module = CausalLM(path=str(model(tmp_path / "model", config)), optimizer={})
    file = texts(tmp_path / "a.jsonl")
    attach(module, data(tmp_path, file))
    with pytest.raises(ValueError, match="use data.packing=false"):
        module.setup("fit")
    module = CausalLM(path=str(tmp_path / "model"), optimizer={})
    attach(module, data(tmp_path, file, packing=False))
    module.setup("fit")


def test_positions_that_go_by_the_longest_document_are_refused_in_packed_rows(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    config = LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=rope)
    module = CausalLM(path=str(model(tmp_path / "model", config)), optimizer={})
    attach(module, data(tmp_path, texts(tmp_path / "a.jsonl")))
    with pytest.raises(ValueError, match="in rows of more than 16 tokens the positions of this model"):
        module.setup("fit")
    assert module.make_cache(16) is not None and module.make_cache(17) is None and not module.takes_padding


def test_a_packed_row_has_the_losses_of_its_documents(tmp_path: Path) -> None:
    """Each by itself, weighted by its labels."""
    module = CausalLM(path=str(model(tmp_path / "model")), optimizer={}).double().eval()
    documents = [Document([*range(begin, end)]) for begin, end in ((5, 15), (20, 42))]  # they fill a row
    sums = []
    for packed in (True, False):
        batches = [{key: torch.tensor([value]) for key, value in row.items()}
                   for row in rows_of(documents, 32, 0, packed=packed)]  # fmt: skip
        with torch.no_grad():
            sums.append(sum(module._loss(batch) * (batch["labels"] != IGNORED).sum() for batch in batches))
    assert torch.allclose(*sums, rtol=0, atol=1e-11)


TINY = [
    "model=hf", "data=hf", "data.context=32", "data.batch_size=4", "trainer.max_steps=4",
    "trainer.limit_val_batches=1.0",
    "trainer.precision=64-true", "trainer.val_check_interval=2",
]  # fmt: skip


def run(pool: WorkerPool, folder: Path, *overrides: str) -> dict[str, Any]:
    """The numbers of a run."""
    return record.read_metrics(trained(pool, folder, *TINY, *overrides))


@pytest.mark.parametrize(("file", "packing", "strategy", "ranks", "workers"), [
    ("chats", "true", "pipeline_zbv", 2, 0),
    *thorough(
        ("texts", "true", "pipeline_tensor", 4, 1), ("questions", "false", "fully_sharded", 2, 0),
        ("chats", "false", "data_parallel", 1, 0),
    ),
])  # fmt: skip
def test_documents_train_as_in_one_process(
    pool: WorkerPool, tmp_path: Path, file: str, packing: str, strategy: str, ranks: int, workers: int
) -> None:
    """The run of several processes goes on in the middle of an epoch."""
    documents = {"chats": chats, "questions": questions, "texts": texts}[file](tmp_path / "documents.jsonl")
    (model(tmp_path / "model") / "model.safetensors").unlink()  # a new model
    given = [f"model.path={tmp_path / 'model'}", f"data.path={documents}", f"data.packing={packing}"]
    one = run(pool, tmp_path / "one", *given, "strategy=single")
    given += [f"strategy={strategy}", f"cluster.devices={ranks}", f"data.workers={workers}"]
    run(pool, tmp_path / "several", *given, "trainer.max_steps=2")
    several = run(pool, tmp_path / "several", *given, "resume=auto")
    assert several == pytest.approx(one, rel=0, abs=EXACT)
