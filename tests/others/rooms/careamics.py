"""careamics: noise2void and supervised restoration, by its own interface."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from careamics import CAREamist
from careamics.config import create_care_configuration, create_n2v_configuration

from tests.others.entry import Entry


def n2v(batch_size: int) -> Any:
    config = create_n2v_configuration("n2v", "array", "YX", [32, 32], batch_size, num_epochs=1, augmentations=[])
    random = numpy.random.default_rng(0)
    CAREamist(config).train(train_source=random.normal(size=(160, 160)).astype("float32"),
                            val_source=random.normal(size=(64, 64)).astype("float32"))  # fmt: skip


def care(batch_size: int) -> Any:
    config = create_care_configuration("care", "array", "YX", [32, 32], batch_size, num_epochs=1, augmentations=[])
    random = numpy.random.default_rng(0)
    big, small = (random.normal(size=(n, n)).astype("float32") for n in (160, 64))
    CAREamist(config).train(train_source=big, train_target=big * 2, val_source=small, val_target=small * 2)


ENTRIES = (
    Entry("noise2void", "careamics", trains=n2v, dtype=torch.float32),
    Entry("care", "careamics", trains=care, dtype=torch.float32),
)
