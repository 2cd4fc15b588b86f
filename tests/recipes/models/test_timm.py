"""recipes/models/timm.py: a model of timm trains as in one process, and the run becomes a folder that timm opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes import commands, evaluate, export, record
from recipes.data.images import ImageData
from recipes.models.timm import TimmClassifier
from tests.recipes.runs import attach, in_the_pool, refused, trained
from tests.recipes.tiny import images
from tools.workers.pool import WorkerPool

pytestmark = pytest.mark.timm

OPTIMIZER = {"_target_": "torch.optim.AdamW", "lr": 1e-2, "eps": 1e-4}
VIT = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}


def small(**more: Any) -> TimmClassifier:
    return TimmClassifier(**{"architecture": VIT, "classes": 4, "arguments": SMALL, "optimizer": OPTIMIZER, **more})


def saved(folder: Path, classes: int = 4) -> Path:
    """A folder as people share them."""
    from timm.models import save_for_hf

    torch.manual_seed(3)
    save_for_hf(small(classes=classes).net, str(folder), safe_serialization=True)
    return folder


# -- what it begins with ---------------------------------------------------------------------------------------------


def test_weights_come_from_a_folder_or_a_file(tmp_path: Path) -> None:
    folder = saved(tmp_path / "vit")
    stored = load_file(folder / "model.safetensors")
    sources: list[dict[str, Any]] = [
        {"architecture": None, "arguments": {}, "pretrained": str(folder)},
        {"pretrained": str(folder)},
        {"pretrained": str(folder / "model.safetensors")},
    ]
    for source in sources:
        module = small(**source)
        assert module.training
        state = module.net.state_dict()
        assert state.keys() == stored.keys() and all(torch.equal(state[name], stored[name]) for name in stored), source
    for source in sources:
        state = small(classes=7, **source).net.state_dict()
        assert state["head.weight"].shape == (7, 32)
        assert all(torch.equal(state[name], stored[name]) for name in stored if not name.startswith("head.")), source
    headless = tmp_path / "headless.safetensors"
    save_file({name: value for name, value in stored.items() if not name.startswith("head.")}, headless)
    assert small(pretrained=str(headless)).net.state_dict()["head.weight"].shape == (4, 32)


@pytest.mark.parametrize(("given", "said"), [
    ({"architecture": "vit_tny_patch16_224"}, "timm has no such model; did you mean vit_tiny_patch16_224"),
    ({"arguments": {"dpth": 3}}, "unexpected keyword argument 'dpth'"),
    ({"pretrained": "{folder}", "architecture": "resnet18"}, "has a vit_tiny_patch16_224; leave the architecture out"),
    ({"pretrained": "{folder}", "arguments": {**SMALL, "depth": 5}}, "Missing key.*\"blocks.4"),
    ({"pretrained": "{folder}/model.safetensors", "arguments": {**SMALL, "depth": 3}}, "Unexpected key.*\"blocks.3"),
    ({"pretrained": "{folder}/config.json"}, "config.json: timm can't make it"),
], ids=str)  # fmt: skip
def test_bad_settings_are_named(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    folder = saved(tmp_path / "vit")
    given = {key: value.format(folder=folder) if isinstance(value, str) else value for key, value in given.items()}
    with pytest.raises(ValueError, match=f"(?s)model.(architecture|pretrained)=.*{said}"):
        small(**given)


@pytest.mark.parametrize(("overrides", "said"), [
    ([], "model.architecture=null: names no model; give a name of timm's, or model.pretrained=FOLDER"),
    (["model.architecture='hf-hub:timm/vit'"], "model.architecture=hf-hub:timm/vit: names a place"),
    (["model.pretrained=/nowhere"], "model.pretrained=/nowhere: no such file or folder"),
    (["model.pretrained={vit}/config.json"], "no file of safetensors"),
    (["model.pretrained={vit}/model.safetensors"], "=null: {vit}/model.safetensors doesn't say which model"),
    (["model.pretrained={pickled}"], "has no model.safetensors"),
    (["model.architecture=x", "data.path={one}"], "only one class, digit-0, in"),
    (["model.architecture=x", "model.classes=3"], "model.classes=3: {images} has 4 classes; use model.classes=4"),
    (["model.architecture=x", "model.arguments={{num_classes:4}}"], "model.arguments.num_classes=4: set by the recipe"),
    (["model.architecture=x", "model.arguments={{img_size:16}}", "data.size=8"], "arguments.img_size=16; leave data"),
    (["model.architecture=x", "data=digits"], "model.classes=null: not known from the data; give their number"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_worker_starts(tmp_path: Path, overrides: list[str], said: str) -> None:
    places = {name: saved(tmp_path / name) for name in ("vit", "pickled")}
    places |= {"images": images(tmp_path / "images"), "one": images(tmp_path / "one", classes=1)}
    (places["pickled"] / "model.safetensors").rename(places["pickled"] / "other.safetensors")
    (places["pickled"] / "pytorch_model.bin").touch()
    given = [word.format(**places) for word in overrides]
    path = [] if {"data=digits", f"data.path={places['one']}"} & set(given) else [f"data.path={places['images']}"]
    assert said.format(**places) in refused("model=timm", "data=images", *path, *given)


def test_images_unlike_those_it_has_learned_from_are_told(tmp_path: Path) -> None:
    data, module = ImageData(path=str(images(tmp_path / "images")), size=16), small(arguments={**SMALL, "img_size": 32})
    attach(module, data)
    with pytest.raises(ValueError, match="data.size=16: the model takes images of 32 x 32: use data.size=32, or"):
        module.setup("fit")
    module = small(pretrained=str(saved(tmp_path / "vit")))
    attach(module, data)
    with pytest.warns(UserWarning, match=r"data.mean=\[0.485, 0.456, 0.406\], but .*vit has learned with \[0.5, "):
        module.setup("fit")


# -- commands --------------------------------------------------------------------------------------------------------

TINY = [
    "model=timm", "data=images", "data.batch_size=4", "trainer.max_steps=2", "trainer.limit_val_batches=1.0",
    "trainer.precision=64-true",
]  # fmt: skip
ARGUMENTS = "model.arguments={img_size:16,patch_size:4,embed_dim:32,depth:4,num_heads:4}"


def run(pool: WorkerPool, folder: Path, *overrides: str) -> Path:
    return trained(pool, folder, *TINY, *overrides)


def logits(folder: Path) -> Tensor:
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).double().eval()
    with torch.no_grad():
        result: Tensor = model(torch.linspace(-1, 1, 3 * 16 * 16, dtype=torch.float64).reshape(1, 3, 16, 16))
    return result


def test_a_run_is_scored_and_exported_as_one_process_has_it(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on from there, without the images' number of classes being told."""
    folder = images(tmp_path / "images")
    given = [f"model.architecture={VIT}", ARGUMENTS, f"data.path={folder}", "data.batch_size=5"]
    given.append("callbacks.checkpoint.save_top_k=-1")  # by itself a run keeps its best weights, not the last ones
    one = run(pool, tmp_path / "one", *given, "strategy=single")
    four = run(pool, tmp_path / "four", *given, "strategy=pipeline_tensor", "cluster.devices=4")
    assert record.read_config(four)["model"]["classes"] == 4
    scores = record.read_metrics(four)
    assert scores == pytest.approx(record.read_metrics(one), rel=0, abs=1e-9)
    for source in (one, four):
        export.main([str(source), f"{source}-exported"])
    exported = tmp_path / "four-exported"
    assert torch.allclose(logits(exported), logits(tmp_path / "one-exported"), rtol=0, atol=1e-6)
    about = json.loads((exported / "config.json").read_text())
    assert about["label_names"] == [f"digit-{label}" for label in range(4)]
    assert about["pretrained_cfg"]["mean"] == [0.485, 0.456, 0.406] and about["pretrained_cfg"]["crop_pct"] == 1.0

    monkeypatch.setattr(commands, "launch", lambda config, choices, overrides: in_the_pool(pool, config, overrides))
    evaluate.main([str(four), "strategy=single"])
    (scored,) = (four / "evaluate").iterdir()
    found = record.read_metrics(scored)
    assert found.keys() == {"val_loss", "val_acc", "test_loss", "test_acc"}
    assert found["val_loss"] == pytest.approx(scores["val_loss"], rel=0, abs=1e-9)

    again = [f"model.pretrained={exported}", f"data.path={folder}", "strategy=pipeline_1f1b", "trainer.max_steps=1"]
    run(pool, tmp_path / "again", *again, "data.size=16", "optimizer.lr=0")
    export.main([str(tmp_path / "again"), str(tmp_path / "again-exported")])
    assert torch.equal(logits(tmp_path / "again-exported"), logits(exported))
    shutil.rmtree(exported)
    with pytest.raises(SystemExit, match="model.pretrained=.*four-exported, which the run began with, isn't there"):
        export.main([str(tmp_path / "again"), str(tmp_path / "more")])
