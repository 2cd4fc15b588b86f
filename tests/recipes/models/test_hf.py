"""A folder of transformers' becomes a run under any layout, and the run a folder again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from recipes import build, export, launch
from recipes.models.hf import CausalLM
from tests.recipes import tiny
from tests.recipes.runs import composed, problems, trained
from tools.workers.pool import WorkerPool

OPTIMIZER = {"_target_": "torch.optim.AdamW", "lr": 1e-2, "eps": 1e-4}
SIZES: dict[str, Any] = {**tiny.SIZES, "vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**{**SIZES, "hidden_size": 40, "head_dim": 8, "pad_token_id": None}),
}


def pretrained(folder: Path, kind: str = "llama") -> Path:
    """A folder as people share them, in several files."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 256, (12, 17), generator=generator)
    return DataLoader([(row[:-1], row[1:]) for row in tokens], batch_size=4)  # type: ignore[arg-type]


# -- commands --------------------------------------------------------------------------------------------------------

TINY = [
    "model=hf", "data.context=16", "data.batch_size=4", "trainer.max_steps=2", "trainer.limit_val_batches=1",
    "trainer.precision=64-true",
]  # fmt: skip


def run(pool: WorkerPool, folder: Path, *overrides: str) -> Path:
    return trained(pool, folder, *TINY, *overrides)


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        result: Tensor = model(torch.arange(16)[None]).logits
    return result


def test_what_is_exported_is_what_one_process_has_trained(pool: WorkerPool, tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    one = run(pool, tmp_path / "one", f"model.path={folder}", "strategy=single")
    two = run(pool, tmp_path / "two", f"model.path={folder}", "strategy=tensor_parallel", "cluster.devices=2")
    for source in (one, two.rename(tmp_path / "moved")):
        export.main([str(source), f"{source}-exported"])
    assert (tmp_path / "moved-exported" / "tokenizer.json").exists()
    (folder / "tokenizer.json").unlink()
    exported = logits(tmp_path / "moved-exported")
    assert torch.allclose(exported, logits(tmp_path / "one-exported"), rtol=0, atol=1e-9)
    assert not torch.allclose(exported, logits(folder), rtol=0, atol=1e-3)


def test_adapters_train_as_in_one_process_and_are_exported_alone_or_merged(pool: WorkerPool, tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "model")
    lora = "model.lora={r:4,target_modules:all-linear,init_lora_weights:false}"
    run(pool, tmp_path / "one", f"model.path={folder}", lora, "strategy=single")
    run(pool, tmp_path / "run", f"model.path={folder}", lora, "strategy=tensor_parallel", "cluster.devices=2")
    export.main([str(tmp_path / "one"), str(tmp_path / "one-merged"), "--merge"])
    export.main([str(tmp_path / "run"), str(tmp_path / "adapters")])
    export.main([str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"])
    assert not list((tmp_path / "adapters").glob("model*"))
    merged = logits(tmp_path / "merged")
    assert torch.allclose(merged, logits(tmp_path / "one-merged"), rtol=0, atol=1e-9)
    assert torch.allclose(merged, logits(tmp_path / "adapters"), rtol=0, atol=1e-6)
    assert not torch.allclose(merged, logits(folder), rtol=0, atol=1e-3)
    with pytest.raises(SystemExit, match="exists: give a folder"):
        export.main([str(tmp_path / "run"), str(tmp_path / "merged")])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(SystemExit, match="no whole checkpoint"):
        export.main([str(tmp_path / "run"), str(tmp_path / "more")])


def test_only_a_run_of_transformers_is_exported(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no folder of a run"):
        export.main([str(tmp_path), str(tmp_path / "out")])
    config = composed("model=gpt", folder=tmp_path)
    launch.write(config)
    with pytest.raises(SystemExit, match="use python -m recipes.convert"):
        export.main([str(tmp_path), str(tmp_path / "out")])


@pytest.mark.parametrize(("config", "said"), [
    ("{}", ""), ('{"vocab_size": 100}', "smaller than the 256 bytes"),
    ('{"quantization_config": {"quant_method": "bitsandbytes"}}', "its weights are quantized"),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    found = problems("model=hf", f"model.path={tmp_path}")
    assert bool(found) == bool(said) and said in str(found)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"lora": {"r": 4, "target_modules": ["nothing"]}}, "model.lora="),
    ({"lora": {"rank": 4}}, "model.lora="),
    ({"path": "/nowhere"}, "model.path=/nowhere"),
], ids=str)  # fmt: skip
def test_bad_settings_are_named(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"path": str(pretrained(tmp_path / "model")), "lora": None, **arguments}
    with pytest.raises(ValueError, match=words):
        CausalLM(optimizer=OPTIMIZER, **given)


# -- folders as people have them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.gguf", "consolidated.00.pth", "tf_model.h5"])
def test_weights_of_another_format_are_not_taken_for_none(tmp_path: Path, name: str) -> None:
    folder = pretrained(tmp_path / "model")
    for file in folder.glob("model*"):
        file.unlink()
    (folder / name).touch()
    with pytest.raises(ValueError, match=f"its weights are in {name}: convert them"):
        CausalLM(path=str(folder), optimizer=OPTIMIZER)


def test_weights_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ValueError, match="has no model.layers.2.* which would begin at random"):
        CausalLM(path=str(folder), optimizer=OPTIMIZER)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    with pytest.warns(UserWarning, match="not used: model.layers.1"):
        CausalLM(path=str(folder), optimizer=OPTIMIZER)
    files = sorted(folder.glob("*.safetensors"))
    files[1].write_bytes(files[1].read_bytes()[:100])
    with pytest.raises(ValueError, match="transformers can't open it"):
        CausalLM(path=str(folder), optimizer=OPTIMIZER)
    for file in files:
        file.unlink()
    with pytest.raises(ValueError, match="transformers can't open it"):
        CausalLM(path=str(folder), optimizer=OPTIMIZER)  # there is a list of them


def fake_run(folder: Path, *overrides: str) -> Path:
    """A run of a model as it begins, with a checkpoint."""
    config = composed(*TINY, *overrides, folder=folder)
    folder.mkdir()
    launch.write(config)
    torch.save({"state_dict": build.model(config).state_dict()}, folder / "begin.ckpt")
    return folder


def exported(run: Path, *words: str) -> None:
    export.main([str(run), str(run.parent / "out"), "--checkpoint", str(run / "begin.ckpt"), *words])


@pytest.mark.parametrize(("lora", "words", "said"), [
    ("{r:4,target_modules:[q_proj,embed_tokens]}", ["--merge"], "share a weight, which can't be merged"),
    ("{r:4,target_modules:[q_proj],use_dora:true}", [], "without their magnitudes: use --merge"),
], ids=["tied", "dora"])  # fmt: skip
def test_what_transformers_would_open_as_another_model_is_not_exported(
    tmp_path: Path, lora: str, words: list[str], said: str
) -> None:
    folder = pretrained(tmp_path / "model", "tied")
    run = fake_run(tmp_path / "run", f"model.path={folder}", f"model.lora={lora}")
    with pytest.raises(SystemExit, match=said):
        exported(run, *words)
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*out*"))


def test_the_rest_of_the_folder_comes_along(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "model")
    rest = ["spiece.model", "additional_chat_templates/tools.jinja", "modeling_own.py", "LICENSE"]
    for name in [*rest, "other.gguf", ".cache/x"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / "tokenizer").mkdir()
    (folder / "generation_config.json").write_text('{"max_new_tokens": 77}')
    exported(fake_run(tmp_path / "run", f"model.path={folder}"))
    files = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert files == {*rest, "config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["max_new_tokens"] == 77


def test_the_tokenizer_of_the_run_and_the_dtype_asked_for_are_exported(tmp_path: Path) -> None:
    folder, other = pretrained(tmp_path / "model"), tmp_path / "tokenizer"
    (folder / "tokenizer.json").write_text("its own")
    (folder / "merges.txt").write_text("its own")
    other.mkdir()
    (other / "tokenizer.json").write_text("other")
    (other / "config.json").write_text("of another model")
    (tmp_path / "a.txt").write_text("text")
    data = ["data=hf", f"data.path={tmp_path / 'a.txt'}", f"data.tokenizer={other}"]
    run = fake_run(tmp_path / "run", f"model.path={folder}", *data)
    exported(run, "--dtype", "bfloat16")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "other"
    assert not (tmp_path / "out" / "merges.txt").exists()
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert weights.dtype is torch.bfloat16 and torch.equal(logits(tmp_path / "out"), logits(folder))
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(other)
    with pytest.raises(SystemExit, match=f"data.tokenizer={other}, which the run began with, isn't there"):
        exported(run)


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": ["embed_tokens"]}], ids=["all", "adapters"])
def test_constants_that_no_file_holds_are_exact(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    """Gemma 3 scales embeddings by the root of their size, which transformers rounds to the dtype of the files."""
    folder = pretrained(tmp_path / "model", "gemma3")
    module = CausalLM(path=str(folder), lora=lora, optimizer=OPTIMIZER)
    L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True).validate(module, batches())
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        found = module.eval()(tokens)
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    assert torch.allclose(found, own, rtol=0, atol=1e-6)
