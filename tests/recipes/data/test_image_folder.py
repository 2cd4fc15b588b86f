"""recipes/data/image_folder.py: which files are whose, and what no folder of images is."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from recipes.data.image_folder import classes_of, problem, splits_of
from tests.recipes.tiny import images


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
