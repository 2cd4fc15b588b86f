"""The images that ``data=images`` reads: a folder for each class. Imports neither torch nor Pillow: asked before any
worker starts.

::

    FOLDER/cat/1.png ...                         a part of each class is held out for validation and test
    FOLDER/train/cat/1.png ...
    FOLDER/val/cat/9.png ...                     if it isn't there, a part of each class in train is held out
    FOLDER/test/cat/7.png ...                    if it isn't there, what is for validation
"""

from __future__ import annotations

import hashlib
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

HELD_OUT = 20  # about one image in so many of each class for validation, and as much again for test; at least one
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_SPLITS = ("train", "val", "test")
_LIKE_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing"})


@dataclass(frozen=True, slots=True)
class Image:
    """A file, and the number of its class."""

    file: str
    label: int


def training_folder(path: Path) -> Path:
    """Where the classes are. A folder ``train`` with images and no folders in it is a class of that name."""
    train = path / "train"
    return train if train.is_dir() and _folders(train) else path


def classes_of(path: Path) -> list[str]:
    """The names of the classes, sorted; a label is a place in this list."""
    return [folder.name for folder in _folders(training_folder(path))]


def problem(path: str | None) -> tuple[str, str] | None:
    """What is wrong with a folder of images and how to put it right; None if nothing is, without opening an image."""
    fix = "give a folder that has a folder of images for each class"
    if path is None:
        return "no folder is given", fix
    root = Path(path)
    if not root.is_dir():
        what = "not a folder" if root.exists() else "no such folder"
        return what, f"{fix} (relative names count from {Path.cwd()})"
    train, classes = training_folder(root), classes_of(root)
    if train == root and classes and {name.lower() for name in classes} <= _LIKE_SPLITS:
        what = f"{', '.join(classes)} look like splits, but not like classes"
        return what, f"name them {', '.join(_SPLITS)}; train has to be there"
    if len(classes) < 2:
        return f"only one class, {classes[0]}, in {train}" if classes else f"no classes in {train}", fix
    splits = [train]
    if train != root:
        others = [folder.name for folder in _folders(root) if folder.name not in _SPLITS]
        if others:
            return f"{others[0]} is beside train", f"name its folders {', '.join(_SPLITS)}"
        splits = [root / name for name in _SPLITS if (root / name).is_dir()]
    for split in splits:
        inside = _folders(split)
        unknown = [folder.name for folder in inside if folder.name not in classes]
        if unknown:
            return f"{split} has a class {unknown[0]}, which {train} has not", "give all of them the same classes"
        empty = [folder for folder in inside if next(_files(folder), None) is None]
        if empty or not inside:
            kinds = ", ".join(sorted(SUFFIXES))
            return f"no images in {(empty or [split])[0]}", f"give it some ({kinds}), or delete it"
    parts = _held_out(root)
    few = [name for name in classes if parts and len(list(islice(_files(train / name), len(parts) + 1))) <= len(parts)]
    if few:
        what = f"{few[0]} has too few images to hold {len(parts)} out for {' and '.join(parts)}"
        return what, f"give more, or folders {', '.join(_SPLITS)}"
    return None


def _held_out(path: Path) -> list[str]:
    """The splits for which images of train are held out."""
    if training_folder(path) == path:
        return ["val", "test"]
    if (path / "val").is_dir():
        return []
    return ["val"] if (path / "test").is_dir() else ["val", "test"]


def other_classes(path: Path, classes: Sequence[str]) -> tuple[str, str] | None:
    """What is wrong where a model has learned with other classes, and how to put it right; None if nothing is."""
    found = classes_of(path)
    if found == list(classes):
        return None
    here, known = (textwrap.shorten(", ".join(names), 300) for names in (found, classes))
    return f"it has the classes {here}, but the run's are {known}", "give a folder with the classes of the run"


def splits_of(path: Path) -> Mapping[str, Sequence[Image]]:
    """The images of ``train``, ``val`` and ``test``, sorted by class and file.

    Which are held out goes by a number drawn from each file's name alone: below 1/20 for validation, below 2/20 for
    test. So it stays when others are added. Only a class that would have none for one of them gives those with its
    lowest numbers, which may change as it grows.

    Args:
        path: one of which :func:`problem` finds nothing.
    """
    train, classes = training_folder(path), classes_of(path)
    named = [name for name in ("val", "test") if train != path and (path / name).is_dir()]
    given = {name: _images(path / name, classes) for name in named}
    if "val" in given:
        return {"train": _images(train, classes), "test": given["val"], **given}
    parts = _held_out(path)
    found: dict[str, list[Image]] = {name: [] for name in ("train", *parts)}
    for label, name in enumerate(classes):
        files = sorted(_files(train / name))
        draws = {file: _draw(file, train) for file in files}
        drawn = sorted(files, key=lambda file: draws[file])
        part_of: dict[str, str] = {}
        for place, part in enumerate(parts, 1):
            most = len(files) - len(part_of) - (len(parts) - place) - 1  # one at least for each that is yet to come
            below = sum(draw * HELD_OUT < place for draw in draws.values())
            taken = min(max(below - len(part_of), 1), most)
            part_of |= dict.fromkeys(drawn[len(part_of) :][:taken], part)
        for file in files:
            found[part_of.get(file, "train")].append(Image(file, label))
    return {**found, **given}


def _draw(file: str, root: Path) -> float:
    """A number in 0..1 that goes by the file's name below the folder."""
    return int.from_bytes(hashlib.sha256(os.fsencode(os.path.relpath(file, root))).digest()) / 2**256


def _images(folder: Path, classes: Sequence[str]) -> list[Image]:
    return [Image(file, label) for label, name in enumerate(classes) for file in sorted(_files(folder / name))]


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: Path) -> Iterator[str]:
    """The images at any depth below a folder, also by links; a folder once, and no links that lead nowhere."""
    seen = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # links may lead in a circle
            folders[:] = []
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = os.path.join(place, name)
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".") and os.path.isfile(file):
                yield file
