"""``python -m recipes.export RUN OUT``: a run's model as a folder that transformers or timm opens.

::

    python -m recipes.export logs/train/runs/2026-11-23_04-26-12-951180 my-model

``AutoModelForCausalLM.from_pretrained("my-model")``, or ``timm.create_model("local-dir:my-model", pretrained=True)``,
has the weights of the run's newest checkpoint, whatever the layout it was trained under. Adapters are exported alone,
as PEFT saves them, or with ``--merge`` as a model without adapters. What else is in the folder that a language model
began with comes along, and the tokenizer that it was trained with.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import record
from recipes.command_line import as_command, typed
from recipes.data.tokenizer import TOKENIZER_FILES, files_of_tokenizer

DTYPES = ("float32", "bfloat16", "float16")
_BEGAN_WITH = {"hf": "path", "timm": "pretrained"}  # a model's setting that names its files


def export(
    run: Path, out: Path, checkpoint: Path | None = None, *, merge: bool = False, dtype: str = "float32"
) -> Path:
    """Write the model of a run. Returns the checkpoint whose weights these are.

    Args:
        run: its folder.
        out: the folder to be written.
        checkpoint: of the run; default: its newest one.
        merge: add the adapters to the weights that they adapt.
        dtype: of the weights that are written, one of :data:`DTYPES`.

    Raises:
        ValueError: there is no such run or checkpoint, its model is none of transformers' or timm's, it has no adapters
            to merge, or ``out`` exists.
    """
    from recipes import build, resume  # here: they import torch

    config = record.read_config(run)
    name = config["model"].get("name")
    if name not in _BEGAN_WITH:
        raise ValueError(f"{run} has no model=hf and no model=timm: use {typed('convert')}.")
    began_with = {f"model.{_BEGAN_WITH[name]}": config["model"][_BEGAN_WITH[name]]}
    began_with["data.tokenizer"] = config["data"].get("tokenizer")
    for setting, source in began_with.items():
        if source is not None and not Path(source).exists():
            raise ValueError(f"{setting}={source}, which the run began with, isn't there: put it back.")
    if out.exists():
        raise ValueError(f"{out} exists: give a folder that doesn't, or delete it.")
    if merge and config["model"].get("lora") is None:
        raise ValueError("--merge: the run has no adapters (model.lora).")
    found = resume.newest(config) if checkpoint is None else str(checkpoint)
    if found is None:
        raise ValueError(f"{run} has no whole checkpoint: give one with --checkpoint.")
    module = build.model(config)
    build.begin_with(module, found, "--checkpoint")
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if name == "hf":
            _save_for_transformers(module, config, part, merge=merge, dtype=dtype)
        else:
            _save_for_timm(module, config, part, dtype)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Path(found)


def _save_for_transformers(module: Any, config: Mapping[str, Any], out: Path, *, merge: bool, dtype: str) -> None:
    model, source, tokenizer = config["model"], Path(config["model"]["path"]), config["data"].get("tokenizer")
    _refuse(module.model, model, merge=merge)
    _in(dtype, module.model.merge_and_unload() if merge else module.model).save_pretrained(out)
    # With the model's own config beside adapters, transformers would look for its weights.
    left_out = {"config.json"} if model["lora"] is not None and not merge else set()
    if tokenizer is not None and Path(tokenizer).resolve() != source.resolve():
        left_out |= set(TOKENIZER_FILES)
        for file in files_of_tokenizer(tokenizer):
            shutil.copy2(file, out)
    _bring_along(source, out, left_out)


def _in(dtype: str, model: Any) -> Any:
    import torch

    return model.to(getattr(torch, dtype))


def _save_for_timm(module: Any, config: Mapping[str, Any], out: Path, dtype: str) -> None:
    """With the names of the classes, as the run has recorded them."""
    from recipes.models.timm import save  # here: it imports torch

    data = config["data"]
    labels = data.get("classes") if data.get("name") == "images" else None
    save(_in(dtype, module.net), out, data, labels if labels and len(labels) == config["model"]["classes"] else None)


def _refuse(model: Any, config: Mapping[str, Any], *, merge: bool) -> None:
    """Raise a ValueError for what transformers would open as another model."""
    from recipes.models.hf_folder import has_weights  # here: it imports torch

    if config["lora"] is None:
        return
    if not merge and not has_weights(Path(config["path"])):
        raise ValueError(f"The weights that were adapted aren't in {config['path']}, but in the run: use --merge.")
    if not merge and config["lora"].get("use_dora"):
        raise ValueError("transformers opens adapters of DoRA without their magnitudes: use --merge.")
    own = model.get_base_model()
    outer = (own.get_input_embeddings(), own.get_output_embeddings())
    if merge and own.config.tie_word_embeddings and any(hasattr(part, "lora_A") for part in outer):
        raise ValueError(
            "The embedding and the output layer share a weight, which can't be merged with adapters of one of them: "
            "leave --merge out."
        )


def _bring_along(source: Path, out: Path, left_out: Collection[str]) -> None:
    """The rest of the folder that the run began with: tokenizer, templates, code, licence."""
    from recipes.models.hf_folder import WEIGHTS  # here: it imports torch

    for file in sorted(source.rglob("*")):
        inside = file.relative_to(source)
        weights = file.suffix in WEIGHTS or file.name.endswith(".index.json")
        hidden = str(inside) in left_out or any(part.startswith(".") for part in inside.parts)
        if file.is_file() and not (weights or hidden or (out / inside).exists()):
            (out / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, out / inside)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=typed("export"), description="Write a run's model as a folder that transformers or timm opens."
    )
    parser.add_argument("run", type=Path, help="the folder of a run with model=hf or model=timm")
    parser.add_argument("out", type=Path, help="the folder to be written")
    parser.add_argument("--checkpoint", type=Path, help="of the run; default: its newest one")
    parser.add_argument("--merge", action="store_true", help="add LoRA's adapters to the weights that they adapt")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of the weights ({DTYPES[0]})")
    given = parser.parse_args(arguments)
    with as_command(ValueError, OSError, RuntimeError, ModuleNotFoundError):
        found = export(given.run, given.out, given.checkpoint, merge=given.merge, dtype=given.dtype)
    print(f"{given.out}: the weights of {found}")


if __name__ == "__main__":
    main()
