"""tools/study/images: every look at a digit is another one, and what is held out stays so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recipes.data.digits import DigitsData
from tests.tools.study.small import TINY
from tools.study.arms import Arm, Run
from tools.study.images import Digits
from tools.study.train import execute

TASK = Digits(shift=1, noise=0.3)


def test_batches_depend_on_the_seed_alone() -> None:
    one, again, other = (torch.cat([x for x, _ in TASK.batches(TINY, seed)]) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert one.shape == (TINY.updates * TINY.batch, 1, 8, 8)


def test_held_out_images_are_those_of_their_split_and_always_the_same() -> None:
    data = DigitsData()
    data.setup("fit")
    plain = replace(TASK, shift=0, noise=0.0)
    x, y = plain.held_out(TINY, "val", 360)
    images, digits = (torch.stack(each) for each in zip(*data.val_set, strict=True))  # type: ignore[arg-type]
    assert torch.equal(x, images.repeat(2, 1, 1, 1)) and torch.equal(y, digits.repeat(2))
    one, again, other = (TASK.held_out(TINY, split, 360)[0] for split in ("val", "val", "test"))
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one[:180], one[180:])


def test_a_digit_is_moved_whole_and_zeros_come_in() -> None:
    still, moved = (replace(TASK, shift=shift, noise=0.0).held_out(TINY, "val", 180)[0] for shift in (0, 1))
    padded = torch.nn.functional.pad(still, [1] * 4)[:, 0]
    places = [
        [torch.equal(m, p[i : i + 8, j : j + 8]) for i in range(3) for j in range(3)]
        for m, p in zip(moved[:, 0], padded, strict=True)
    ]
    assert all(any(each) for each in places)
    assert len({each.index(True) for each in places}) == 9


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    plain, noisy = (replace(TASK, shift=0, noise=noise).held_out(TINY, "val", 1800)[0] for noise in (0.0, 0.3))
    assert (noisy - plain).std().item() == pytest.approx(0.3, rel=0.01)


def test_the_fingerprint_tells_all_that_decides_the_batches() -> None:
    others = [replace(TASK, shift=2), replace(TASK, noise=0.2), TASK]
    assert len({task.fingerprint() for task in others}) == 3


def test_late_gradients_change_what_is_learned() -> None:
    results = [execute(Run(TINY, arm, 0.01, 0), TASK) for arm in (Arm("adamw"), Arm("adamw", 4, 8))]
    assert results[0]["final"] != results[1]["final"] and all(result["final"] is not None for result in results)
