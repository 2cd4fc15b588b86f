"""The asynchronous pipeline in one process: `tools.study.reference` trains a model of `models.py`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies.equality import EXACT
from tests.strategies.harness import joined, largest_difference, train
from tests.strategies.models import BATCH, MODELS, Base
from tools.study import reference
from tools.study.reference import Trained

OF_RANKS = ("activation_checkpointing", "data_parallel", "tensor_parallel")  # settings that change no number


def assert_equals_delayed(
    launch: Any,
    model: str | type[Base],
    stages: int,
    microbatches: int,
    options: dict[str, Any],
    trainer_options: dict[str, Any],
    *,
    allowed: float = 0.0,
) -> None:
    """Two epochs under the strategy with these options have the numbers of the reference: losses, the gradients of each
    update, and weights.

    Args:
        allowed: by how much weights and gradients may differ.
    """
    replicas, tensor = options.get("data_parallel", 1), options.get("tensor_parallel", 1)
    given = {"stages": stages, "microbatches": microbatches, **options}
    trainer = {"batch_size": BATCH // replicas, "max_epochs": 2, **trainer_options}
    reports = launch(train, stages * replicas * tensor, model, "async", given, **trainer)
    accumulate, clip = trainer_options.get("accumulate_grad_batches", 1), trainer_options.get("gradient_clip_val")
    own = {name: value for name, value in options.items() if name not in OF_RANKS}
    given = {"epochs": 2, "accumulate": accumulate, "clip": clip, **own}
    [single] = launch(delayed, 1, model, stages, microbatches, **given)
    if replicas == 1:  # else a rank has its replica's
        assert reports[0].losses == pytest.approx(single.losses, rel=0, abs=EXACT)
    if "schedule" not in options:  # else each chunk's, as if they were updates
        for number, expected in enumerate(single.gradients):
            found = joined(reports, "gradients", number)  # each stage's own, though they step at different times
            assert largest_difference(found, expected) <= allowed, f"update {number}"
    assert largest_difference(joined(reports, "weights"), single.weights) <= allowed


def delayed(model: str | type[Base], stages: int, microbatches: int, average: Any = None, **options: Any) -> Trained:
    """Train a model of `models.py`; options of `tools.study.reference.delayed`, and what makes its average."""
    kind = MODELS[model] if isinstance(model, str) else model
    options |= {"average": average and average(), "read_last": ("temperature",)}
    return reference.delayed(kind, stages, microbatches, **options)
