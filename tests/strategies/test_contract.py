"""The contract: whatever the layout, whatever the run, the numbers of one process, or a refusal before training.

A row is a model under a layout with a feature of the run. Compared are, in float64: the loss of each batch, every
gradient before its update, every weight and moment of the optimizers, and what is logged on every rank. All of it is
compared again for a run that goes on from a checkpoint of the layout: in one process, and in a row of each layout
(RESUME) under it, too. In thorough runs it goes on under the layout in all rows. See contract.py.

By default each layout has every model and every feature in a row. What a feature does to a model without a layout is
Lightning's own, so these two aren't crossed. A layout whose parts other layouts have too is in a few rows
(LIKE_OTHERS), with what those parts have to agree on. In thorough runs all combinations are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from tests.strategies.contract import (
    FEATURES,
    LAYOUTS,
    Layout,
    Report,
    Row,
    Run,
    differences,
    fit,
    from_checkpoints,
    in_one_process,
    staged,
    under_layout,
)
from tests.strategies.contract_models import MODELS
from tests.thorough import thorough

PIPELINES = [name for name in LAYOUTS if name not in ("replicas", "threads", "sharded", "tensor")]
ALONE = ("sharded", "tensor", "1f1b", "zbv", "async")  # layouts whose parts no other one has
ALWAYS = {("Language", "1f1b"): "accumulation"}  # batches count alike, however many labels each has

# gpipe has the chunks of 1f1b, interleaved as many as zbv, vmin the V of zbv. Stages of replicas or shards are those of
# 1f1b, and the shards those of tensor.
LIKE_OTHERS = [
    ("Perceptron", "gpipe", "all"),
    ("Language", "interleaved", "groups"),  # chunks of both stages have tied weights
    ("Skipping", "vmin", "accumulation"),  # three stages, which the skips pass by
    ("Language", "async in a V", "groups"),  # tied weights are on one stage
    ("Language", "pipeline x tensor", "clipping by norm"),  # over both axes, where tied weights count once
    ("Loose", "pipeline x data", "accumulation"),  # gradients of replicas and stages are joined once
    ("TwoOptimizers", "replicas", "groups"),
    ("Perceptron", "replicas", "early optimizer"),
    ("TwoTerms", "replicas", "all"),
    ("Language", "threads", "early optimizer"),
    ("Perceptron", "threads", "all"),
]

# What the library refuses, and words of the message.
REFUSED: dict[tuple[str, str], list[str]] = {
    ("Skipping", "tensor"): ["no pair of its layers could be divided", "(Linear)"],
    ("Skipping", "pipeline x tensor"): ["no pair of its layers could be divided", "(Linear)"],
    ("Language", "async"): ["is tied to", "head.weight", "stages [0, 1]", "tie_word_embeddings=False"],
    ("Loose", "async"): ["'position' is used on stages [0, 1]", "PipelineStrategy"],
    ("Loose", "async in a V"): ["'position' is used on stages [0, 1]", "PipelineStrategy"],
    ("TwoOptimizers", "threads"): ["automatic_optimization=False", "'ddp'"],
    **{("TwoOptimizers", layout): ["automatic_optimization=False", "FullyShardedStrategy"] for layout in PIPELINES},
}
REFUSED_ALIKE = [("TwoOptimizers", layout) for layout in PIPELINES if layout not in ("zbv", "async", "async in a V")]
# What has other numbers by nature, as documented.
OTHERWISE = {
    ("async", "clipping by norm"): "each stage clips by its own norm",
    ("async", "all"): "each stage clips by its own norm",
    ("async in a V", "clipping by norm"): "each chunk clips by its own norm",
    ("async in a V", "all"): "each chunk clips by its own norm",
}
# What Lightning itself refuses.
NOT_BY_HAND = ("accumulation", "clipping by norm", "clipping by value", "all")


def is_supported(model: str, layout: str, feature: str) -> bool:
    if model == "TwoOptimizers" and feature in NOT_BY_HAND:
        return False
    return (model, layout) not in REFUSED and (layout, feature) not in OTHERWISE


def each_model_under_each_layout() -> Iterator[tuple[str, str, str]]:
    """With features in turn: those that the layout, and then the model, has had in the fewest rows."""
    rows = Counter[tuple[str, str]]()
    for layout in ALONE:
        for model in ("TwoOptimizers", *(name for name in MODELS if name != "TwoOptimizers")):  # first what suits few
            features = [name for name in FEATURES if is_supported(model, layout, name)]
            if features:
                found = min(features, key=lambda name: (rows[layout, name], rows[model, name]))
                feature = ALWAYS.get((model, layout), found)
                rows.update([(layout, feature), (model, feature)])
                yield model, layout, feature


USUAL = [*LIKE_OTHERS, *each_model_under_each_layout()]
ALL = [row for row in product(MODELS, LAYOUTS, FEATURES) if is_supported(*row)]
RESUME = {next(row for row in USUAL if layout in row) for layout in {row[1] for row in USUAL}}


@pytest.fixture(scope="module")
def alone(launch: Any) -> Any:
    """``alone(row)``: what one process has to say. Each made once."""
    runs: dict[Any, Run] = {}

    def get(row: Row) -> Run:
        if row.reference not in runs:
            runs[row.reference] = launch(in_one_process, 1, row)[0]
        return runs[row.reference]

    return get


@pytest.mark.parametrize(("model", "layout", "feature"), [*USUAL, *thorough(*(row for row in ALL if row not in USUAL))])
def test_a_layout_has_the_numbers_of_one_process(
    launch: Any, alone: Any, tmp_path: Path, pytestconfig: pytest.Config, model: str, layout: str, feature: str
) -> None:
    resumes = (model, layout, feature) in RESUME or pytestconfig.getoption("thorough")
    row = Row(model, layout, feature, resumes=resumes)
    ranks = launch(under_layout, LAYOUTS[layout].ranks, row, tmp_path)
    resumed = launch(from_checkpoints, 1, row, tmp_path)[0]
    found = differences(alone(row), ranks, resumed)
    assert not found, "\n".join(found[:20])


# -- refusals --------------------------------------------------------------------------------------------------------


class NeverTrains(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise AssertionError("a batch was trained")


@pytest.mark.parametrize(("model", "layout"), [
    *(row for row in REFUSED if row not in REFUSED_ALIKE), *thorough(*REFUSED_ALIKE),
])  # fmt: skip
def test_what_is_not_supported_is_refused_before_training(
    refused: Any, tmp_path: Path, model: str, layout: str
) -> None:
    row = Row(model, layout, "groups", callback=NeverTrains())
    refused(REFUSED[model, layout], under_layout, LAYOUTS[layout].ranks, row, tmp_path)


# -- the contract notices --------------------------------------------------------------------------------------------


def test_the_contract_notices() -> None:
    """Another gradient in a run that goes on, another loss, and a number that one rank doesn't log."""
    report = Report(0, [1.0, 0.5], [("after the run", {"train_loss": 0.5})])
    alone, other = ((report, {"weight gradient_2": torch.tensor([value])}) for value in (1.0, 1.1))
    lower, silent = replace(report, losses=[1.0, 0.4]), replace(report, logged=[("after the run", {})])
    assert differences(alone, [report, report], [alone, alone]) == []
    for ranks, resumed, start in (
        ([report, report], [alone, other], "loaded: weight gradient_2 differs"),
        ([lower, lower], [alone, alone], "losses: [1.0, 0.4]"),
        ([report, silent], [alone, alone], "rank 1, after the run: train_loss"),
    ):
        (found,) = differences(alone, ranks, resumed)
        assert found.startswith(start)


# -- ranks that are alone --------------------------------------------------------------------------------------------

COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "broadcast_object_list", "all_gather_object", "gather_object", "barrier",
)  # fmt: skip


def collectives_of_one(layout: Layout) -> list[str]:
    """Those that a fit on two ranks calls in a group of one rank."""
    found: list[str] = []

    def noting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            group = next((x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup)), None)
            found.extend([name] if dist.get_world_size(group) == 1 else [])
            return collective(*args, **kwargs)

        return noted

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(patch.object(dist, name, noting(name, getattr(dist, name))))
        fit(Row("TwoTerms", "1f1b", "clipping by norm"), layout, epochs=1)  # logs with sync_dist=True
    return found


@pytest.mark.parametrize("layout", [
    *(LAYOUTS[name] for name in ("1f1b", "async", "tensor", "replicas", "sharded")),
    staged(stages=1, data_parallel=2),
], ids=str)  # fmt: skip
def test_a_rank_alone_sends_nothing(launch: Any, layout: Layout) -> None:
    """Along an axis: over NCCL a group of one rank would be connected too."""
    assert launch(collectives_of_one, 2, layout) == [[], []]
