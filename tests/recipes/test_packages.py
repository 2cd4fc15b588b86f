"""recipes/process_rules.py: a missing package is named before anything starts, with the extra that brings it."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import process_rules
from tests.recipes.test_configs import problems


@pytest.mark.parametrize(
    ("overrides", "missing", "extra"),
    [
        (["model=hf", "model.path={folder}", "data=hf", "data.path={file}"], "transformers and safetensors", "hf"),
        (["model=hf", "model.path={folder}", "model.lora={{r: 2}}", "data=stdlib"], "peft", "hf"),
        (["model=timm", "data=images", "data.path={folder}"], "timm and torchvision", "images"),
        (["model=hf", "model.path={folder}", "data=hf", "data.path={file}"], "datasets", "hf"),
        (["model=lenet", "data=images", "data.path={folder}"], "pillow", "images"),
        (["logger=wandb"], "wandb", "wandb"),
        (["logger=mlflow"], "mlflow-skinny", "mlflow"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    overrides: list[str], missing: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"mlflow": "mlflow-skinny", "PIL": "pillow"}
    there = lambda module: None if modules.get(module, module) in missing.split(" and ") else object()  # noqa: E731
    monkeypatch.setattr(process_rules, "find_spec", there)
    given = [each.format(folder=tmp_path, file=tmp_path / "data.jsonl") for each in overrides]
    (found,) = (p for p in problems("strategy=single", *given) if "not installed" in p.message)
    assert found.message == f"{missing} not installed" and found.fix == f'pip install ".[recipes,{extra}]"'


def test_a_broken_value_of_one_group_hides_no_package_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_rules, "find_spec", lambda module: None)
    told = [str(p) for p in problems("strategy=single", "model=hf", "model.lora=3", "data=stdlib", "logger=wandb")]
    assert any("model.lora=3" in each for each in told) and any("wandb not installed" in each for each in told)
