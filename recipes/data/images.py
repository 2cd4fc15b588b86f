"""Images of the user's own, in a folder for each class."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from recipes.data import image_folder
from recipes.data.base import SeededData
from recipes.data.image_folder import Image, classes_of, splits_of

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, red, green and blue
_CROPPED = 7 / 8  # a random crop's part of the largest square


class ImageData(SeededData):
    """``(images, labels)``: float32 [batch, 3, size, size], normalised, and int64 [batch].

    The largest square in the middle of an image is scaled to ``size``. What training draws goes by the seed, the epoch
    and the image, so it is the same under every layout, with any number of workers, and in a run that goes on.
    conf/data/images.yaml says what the settings mean, :mod:`recipes.data.image_folder` what is in the folder.

    Raises:
        ValueError: the folder can't be used, or an image in it can't be read; names it and the fix.
    """

    def __init__(
        self,
        *,
        path: str | None,
        size: int = 224,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        random_crop: bool = True,
        random_flip: bool = True,
        classes: Sequence[str] | None = None,
        batch_size: int = 32,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, workers, seed)
        found = image_folder.problem(path)
        if found is None and path is not None and classes is not None:
            found = image_folder.other_classes(Path(path), classes)
        if found is not None:
            raise ValueError(f"data.path={path}: {found[0]}; {found[1]}")
        assert path is not None
        self.path, self.size = Path(path), size
        self.mean, self.std = tuple(mean), tuple(std)
        self.random_crop, self.random_flip = random_crop, random_flip
        self.classes = classes_of(self.path)

    def setup(self, stage: str) -> None:
        splits = splits_of(self.path)
        content = _hash(self.path, [image for images in splits.values() for image in images])  # names and sizes
        self.fingerprint = f"{self.path.name} sha256:{content}"
        self.train_set = Images(splits["train"], self, train=True)
        self.val_set, self.test_set = Images(splits["val"], self), Images(splits["test"], self)

    def _sampler(self, dataset: Dataset[Any], order: dict[str, Any]) -> DistributedSampler[Any]:
        return EpochSampler(dataset, **order) if dataset is self.train_set else super()._sampler(dataset, order)


@dataclass(frozen=True, slots=True)
class Visit:
    """An image in an epoch."""

    number: int
    epoch: int


class EpochSampler(DistributedSampler[Any]):
    """A DistributedSampler that gives :class:`Visit` instead of numbers: loader processes that live on don't hear
    otherwise that an epoch has begun."""

    def __iter__(self) -> Iterator[Visit]:
        for number in super().__iter__():
            yield Visit(number, self.epoch)


class Images(Dataset[tuple[Tensor, int]]):
    """Images, read when they are asked for; for training, cropped and flipped as the data say."""

    def __init__(self, images: Sequence[Image], data: ImageData, *, train: bool = False) -> None:
        self.images, self.size, self.seed = images, data.size, data.seed
        self.random_crop, self.random_flip = train and data.random_crop, train and data.random_flip
        self._mean, self._std = np.asarray(data.mean, np.float32), np.asarray(data.std, np.float32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, visit: Visit | int) -> tuple[Tensor, int]:
        if isinstance(visit, int):  # of another sampler, such as Lightning's for overfit_batches
            visit = Visit(visit, 0)
        image = self.images[visit.number]
        draw = np.random.default_rng((self.seed, visit.epoch, visit.number))
        place = draw.random(2) if self.random_crop else np.array([0.5, 0.5])
        pixels = _square(image.file, self.size, _CROPPED if self.random_crop else 1.0, place)
        if self.random_flip and draw.random() < 0.5:
            pixels = pixels[:, ::-1]
        normalised = (pixels / np.float32(255) - self._mean) / self._std
        return torch.from_numpy(np.ascontiguousarray(normalised.transpose(2, 0, 1))), image.label


def _square(file: str, size: int, part: float, place: np.ndarray) -> np.ndarray:
    """A square of an image, uint8 [size, size, 3].

    Args:
        part: its height and width, of those of the largest square.
        place: from the left and from the top, 0..1.

    Raises:
        ValueError: the file can't be used.
    """
    try:
        with PIL.Image.open(file) as opened:
            image = _as_rgb(PIL.ImageOps.exif_transpose(opened))
    except (OSError, ValueError, SyntaxError, struct.error, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"{file}: it can't be used: {error}; replace it or delete it") from error
    side = part * min(image.size)
    left, top = (image.width - side) * place[0], (image.height - side) * place[1]
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), PIL.Image.Resampling.BICUBIC, box=box))


def _as_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """With eight bits a colour. Pillow itself clips what has more. ValueError: no black and white are known."""
    if image.mode.startswith("I;16"):
        image = PIL.Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its numbers (mode {image.mode}) have no known range")
    return image.convert("RGB")


def _hash(root: Path, images: Sequence[Image]) -> str:
    content = hashlib.sha256()
    for image in images:
        content.update(os.fsencode(f"{os.path.relpath(image.file, root)}\0{os.path.getsize(image.file)}\0"))
    return content.hexdigest()
