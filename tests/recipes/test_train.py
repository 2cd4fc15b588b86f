"""recipes/train.py: what the user sees, and what a sweep gets."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from recipes import ROOT
from recipes.train import UnknownMetric, _optimized
from tests.recipes.test_configs import GROUPS


def test_help_is_one_readable_page() -> None:
    command = [sys.executable, "-m", "recipes.train", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(group in text for group in GROUPS)
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) < 120


def test_the_metric_to_optimise_is_returned_or_its_name_refused() -> None:
    metrics = {"val_loss": 1.5, "train_loss": None}
    assert _optimized("val_loss", metrics, sweeping=True) == 1.5
    assert _optimized(None, metrics, sweeping=True) is None
    assert _optimized("loss", metrics, sweeping=False) is None  # nobody asks for it
    diverged = _optimized("train_loss", metrics, sweeping=True)
    assert diverged is not None and math.isnan(diverged)
    with pytest.raises(UnknownMetric, match="optimized_metric=loss: .*; use one of val_loss, train_loss"):
        _optimized("loss", metrics, sweeping=True)
