"""recipes/data/images.py, image_folder.py: which files are whose; they become the same batches, whatever the layout."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from recipes import launch, record
from recipes.commands import config_of
from recipes.data.image_folder import classes_of, problem, splits_of
from recipes.data.images import ImageData
from recipes.validate import validate
from tests.recipes.runs import composed, problems, refused
from tests.recipes.tiny import images

LENET = ["model=lenet", "model.channels=3", "model.size=16", "model.classes=4", "data=images", "data.size=16"]


def data(folder: Path, **more: Any) -> ImageData:
    made = ImageData(path=str(folder), **{"size": 8, "batch_size": 4, **more})
    made.trainer = SimpleNamespace(distributed_sampler_kwargs=None)  # type: ignore[assignment]
    made.setup("fit")
    return made


def epochs(made: ImageData, *numbers: int) -> list[Tensor]:
    """The training images of epochs, each [samples, 3, size, size]."""
    loader = made.train_dataloader()
    found = []
    for number in numbers:
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]  # as Lightning does
        found.append(torch.cat([batch for batch, _ in loader]))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images(tmp_path_factory.mktemp("images") / "digits", each=12)


def test_images_are_squares_normalised(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            red = np.zeros((6, 14, 3), np.uint8)
            red[:, 2:12, 0] = 255  # the square in the middle, and what scaling looks at beside it
            Image.fromarray(red).save(tmp_path / name / f"{number}.png")
    made = data(tmp_path, mean=(0.5, 0.5, 0.5), std=(0.25, 0.5, 0.5), batch_size=2)
    (batch, labels), *_ = made.val_dataloader()
    assert batch.dtype == torch.float32 and batch.shape == (2, 3, 8, 8) and labels.tolist() == [0, 1]
    assert torch.equal(batch, torch.tensor([2.0, -1.0, -1.0])[:, None, None].expand(2, 3, 8, 8))
    assert made.classes == ["a", "b"] and made.fingerprint.startswith(f"{tmp_path.name} sha256:")


def test_what_is_drawn_goes_by_seed_and_epoch_alone(folder: Path) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    first, second = epochs(data(folder), 0, 1)
    torch.manual_seed(1)
    np.random.seed(1)
    for workers in (0, 2):  # with workers that live through both epochs
        again = epochs(data(folder, workers=workers), 0, 1)
        assert torch.equal(again[0], first) and torch.equal(again[1], second)
    assert not torch.equal(epochs(data(folder, seed=1), 0)[0], first)


@pytest.mark.parametrize(("crop", "flip"), [(True, False), (False, True)])
def test_crops_and_flips_are_drawn_anew_in_each_epoch(folder: Path, crop: bool, flip: bool) -> None:
    made = data(folder, random_crop=crop, random_flip=flip)
    order, plain = made.train_dataloader().sampler, data(folder, random_crop=False, random_flip=False)
    seen = []
    for epoch in range(2):
        order.set_epoch(epoch)  # type: ignore[attr-defined]
        seen.append({visit.number: made.train_set[visit][0] for visit in order})
    assert seen[0].keys() == seen[1].keys() == set(range(len(made.train_set)))  # type: ignore[arg-type]
    changed = sum(not torch.equal(seen[0][number], seen[1][number]) for number in seen[0])
    assert changed > 0
    if flip:
        mirrored = [torch.equal(seen[0][n].flip(2), plain.train_set[n][0]) for n in seen[0]]
        same = [torch.equal(seen[0][n], plain.train_set[n][0]) for n in seen[0]]
        assert 0 < sum(mirrored) < len(seen[0]) and all(a or b for a, b in zip(mirrored, same, strict=True))
    validation = [torch.cat([batch for batch, _ in each.val_dataloader()]) for each in (made, plain)]
    assert torch.equal(*validation)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_is_named(tmp_path: Path, workers: int) -> None:
    bad = images(tmp_path / "images", classes=2) / "digit-1" / "0003.png"
    bad.write_bytes(bad.read_bytes()[:80])
    made = data(tmp_path / "images", workers=workers, batch_size=1)  # none is left out
    with pytest.raises(ValueError, match=f"{bad}: it can't be used: .*; replace it or delete it"):
        for loader in (made.train_dataloader(), made.val_dataloader(), made.test_dataloader()):
            list(loader)


# -- settings --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_a_worker_starts(folder: Path) -> None:
    wrong = {
        "model.classes=10": f"model.classes=10: {folder} has 4 classes; use model.classes=4",
        "model.channels=1": "data=images data.size=16 gives images of 3 x 16 x 16; use model.channels=3",
        "model.size=8": "use model.size=16",
        "data.std=[1,1,0]": "data.std=[1, 1, 0]: not a number above 0 for each of red, green and blue",
        "data.mean=[0.5]": "data.mean=[0.5]: not three numbers",
    }
    told = [str(problem) for problem in problems(*LENET, f"data.path={folder}", *wrong)]
    assert len(told) == len(wrong) and all(any(said in each for each in told) for said in wrong.values()), told
    assert refused(*LENET, "data.path=/nowhere").startswith("data.path=/nowhere: no such folder")


def recorded(run: Path, folder: Path, model: list[str]) -> Path:
    """A run, as far as later commands look at it. Returns its checkpoint."""
    words = [*model, "data=images", f"data.path={folder}"]
    config = composed(*words, folder=run)
    run.mkdir()
    launch.write(config)
    record.start(run, config, {}, words)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    return run / "checkpoints" / "last.ckpt"


REFUSED = (
    "data.path={other}: it has the classes digit-0, digit-1, digit-2, but the run's are digit-0, digit-1, digit-2, "
    "digit-3; give a folder with the classes of the run"
)


@pytest.mark.parametrize("model", [
    ["model=lenet", "model.classes=4"], ["model=timm", "model.architecture=x"],
], ids=["lenet", "timm"])  # fmt: skip
def test_later_commands_and_runs_have_the_classes_of_the_run(tmp_path: Path, folder: Path, model: list[str]) -> None:
    """Those of other images change neither their names nor the model."""
    checkpoint, other = recorded(tmp_path / "run", folder, model), images(tmp_path / "other", classes=3)
    assert record.read_config(tmp_path / "run")["data"]["classes"] == [f"digit-{label}" for label in range(4)]
    config = config_of("evaluate", tmp_path / "run", tmp_path / "new", [f"data.path={other}"], checkpoint)
    assert config["model"]["classes"] == len(config["data"]["classes"]) == 4
    assert [said for said in map(str, validate(config)) if "class" in said] == [REFUSED.format(other=other)]
    with pytest.raises(ValueError, match="but the run's are digit-0, digit-1, digit-2, digit-3"):
        ImageData(path=str(other), classes=config["data"]["classes"])
    goes_on = composed(*model, "data=images", f"data.path={other}", f"ckpt_path={checkpoint}")
    assert goes_on["model"]["classes"] == 4 and REFUSED.format(other=other) in map(str, validate(goes_on))


def files(path: Path) -> dict[str, set[str]]:
    return {name: {image.file for image in split} for name, split in splits_of(path).items()}


def empty_files(folder: Path, numbers: range) -> Path:
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in numbers:
            (folder / name / f"{number}.png").touch()
    return folder


def test_a_share_of_each_class_is_held_out_whatever_else_is_there(tmp_path: Path) -> None:
    folder = empty_files(tmp_path / "images", range(600))
    before = files(folder)
    assert not set.intersection(*before.values()) and len(set.union(*before.values())) == 1200
    for name in ("val", "test"):
        each = Counter(image.label for image in splits_of(folder)[name])
        assert each.keys() == {0, 1} and all(20 <= count <= 40 for count in each.values())
    empty_files(folder, range(600, 1000))
    shutil.copytree(folder / "a", folder / "c")
    after = files(folder)
    assert all(before[name] < after[name] for name in before)


@pytest.mark.parametrize("each", range(3, 8))
def test_each_split_of_a_small_class_has_an_image(tmp_path: Path, each: int) -> None:
    for start in range(0, 40 * each, each):  # among them classes with all numbers low, or all high
        found = splits_of(empty_files(tmp_path / str(start), range(start, start + each)))
        assert all({image.label for image in split} == {0, 1} for split in found.values())
        assert sum(len(split) for split in found.values()) == len({i.file for s in found.values() for i in s})


def test_folders_of_splits_are_taken_as_they_are(tmp_path: Path) -> None:
    for number, split in enumerate(("train", "val", "test")):
        images(tmp_path / "all" / split, each=4 + number)
    assert classes_of(tmp_path / "all") == [f"digit-{label}" for label in range(4)]
    assert {name: len(split) for name, split in files(tmp_path / "all").items()} == {"train": 16, "val": 20, "test": 24}
    shutil.rmtree(tmp_path / "all" / "test")
    found = files(tmp_path / "all")
    assert found["test"] == found["val"] and len(found["train"]) == 16
    shutil.rmtree(tmp_path / "all" / "val")
    assert {Path(file).parents[1].name for split in files(tmp_path / "all").values() for file in split} == {"train"}


def test_what_is_no_folder_of_images_is_told_with_the_fix(tmp_path: Path) -> None:
    def said(path: Path | None) -> str:
        return "; ".join(problem(None if path is None else str(path)) or ())

    assert said(None).startswith("no folder is given; give a folder that has a folder of images for each class")
    assert said(tmp_path).startswith(f"no classes in {tmp_path}; ")
    assert said(images(tmp_path / "one", classes=1)).startswith(f"only one class, digit-0, in {tmp_path}/one; ")
    empty = images(tmp_path / "empty", classes=2)
    (empty / "digit-2").mkdir()
    (empty / "digit-2" / "notes.txt").touch()
    assert said(empty).startswith(f"no images in {empty}/digit-2; give it some (.bmp, ")
    split = images(tmp_path / "split" / "train").parent
    assert said(split) == ""
    images(split / "valid")
    assert said(split) == "valid is beside train; name its folders train, val, test"
    (split / "valid").rename(split / "val")
    (split / "val" / "digit-0").rename(split / "val" / "digit-7")
    assert "val has a class digit-7, which " in said(split)
