"""``share_predictions=True``: on every rank, ``trainer.predict`` returns what one process returns."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset
from transformers.utils import ModelOutput

from lightning_parallel.batch import tensors
from lightning_parallel.results.predictions import _of_one_process, _Share
from tests.pool import WorkerPool
from tests.strategies.harness import make_trainer

LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "sync", {}),
    (2, "async", {}),
    (4, "sync", {"stages": 2, "data_parallel": 2}),
    (4, "sync", {"stages": 2, "tensor_parallel": 2, "plan": {"net.0": "column", "net.2": "row"}}),
    (2, "tensor", {"plan": {"net.0": "column", "net.2": "row"}}),
    (4, "sync", {"stages": 2, "data_parallel": 2, "data_parallel_kind": "fully_shard"}),
    (2, "fsdp", {}),
    (3, "fsdp", {}),
]


@dataclass
class Found(ModelOutput):
    scores: Tensor | None = None
    hidden: Tensor | None = None


class Predicts(L.LightningModule):
    """Everything that a prediction may be made of."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 4))
        self.mean = mean

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        scores = self.net(batch[0])
        if self.mean:
            return scores.mean()
        names = [f"sample {int(number)}" for number in batch[1]]
        boxes = [
            {"box": row[: 1 + int(number) % 3], "label": int(number)}
            for row, number in zip(scores, batch[1], strict=True)
        ]
        return {
            "scores": scores,
            "pair": (scores.argmax(-1), batch[1]),
            "names": names,
            "boxes": boxes,
            "out": Found(scores),
        }


def loader(samples: int) -> DataLoader[Any]:
    features = torch.randn(samples, 3, generator=torch.Generator().manual_seed(samples))
    return DataLoader(TensorDataset(features, torch.arange(samples)), batch_size=3)


def predict(strategy: str, options: dict[str, Any], counts: list[int], mean: bool = False, **given: Any) -> Any:
    """The predictions, and the warnings that are about them."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        shared = options if strategy == "single" else {**options, "share_predictions": True}
        loaders = [loader(count) for count in counts]
        trainer = make_trainer(strategy, [], shared)
        found = trainer.predict(Predicts(mean), loaders if len(loaders) > 1 else loaders[0], **given)
    return found, [str(each.message) for each in seen if "share_predictions" in str(each.message)]


def assert_same(found: Any, expected: Any) -> None:
    """Equal, but for the rounding of numbers."""
    for mine, theirs in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert structure(found) == structure(expected)


def structure(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), {key: structure(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [structure(each) for each in value]
    return tuple(value.shape) if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    ("ranks", "strategy", "options", "counts"),
    [*((*layout, [13, 6]) for layout in LAYOUTS), (2, "sync", {}, [10]), (3, "fsdp", {}, [10])],
)
def test_every_rank_has_the_predictions_of_one_process(
    pool: WorkerPool, ranks: int, strategy: str, options: dict[str, Any], counts: list[int]
) -> None:
    expected, _ = pool.run(predict, 1, "single", {}, counts, init=False)[0]
    for found, complaints in pool.run(predict, ranks, strategy, options, counts, init=False):
        assert_same(found, expected)
        assert not complaints


class ByLoader(L.LightningModule):
    """Each loader has a network of its own; the step counts its samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        blocks = [nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))) for _ in range(2)]
        self.nets = nn.ModuleList(blocks)
        self.counted: list[int] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.counted += batch[1].tolist()
        return self.nets[dataloader_idx](batch[0])


def predict_by_loader(strategy: str) -> Any:
    module = ByLoader()
    trainer = make_trainer(strategy, [], {} if strategy == "single" else {"share_predictions": True})
    return trainer.predict(module, [loader(13), loader(6)]), module.counted


def test_each_loader_is_ended_together_and_the_steps_of_others_have_no_effect(pool: WorkerPool) -> None:
    expected, _ = pool.run(predict_by_loader, 1, "single", init=False)[0]
    ranks = pool.run(predict_by_loader, 2, "fsdp", init=False)
    for found, _ in ranks:
        assert_same(found, expected)
    assert sorted(ranks[0][1] + ranks[1][1]) == sorted([*range(13), *range(6)])


class TakesBatches(Predicts):
    def predict_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.net(next(dataloader_iter)[0][0])


def predict_from_an_iterator() -> Any:
    return make_trainer("fsdp", [], {}).predict(TakesBatches(), loader(7))


def test_a_step_that_takes_its_batches_itself_is_refused(pool: WorkerPool) -> None:
    for error in pool.run(predict_from_an_iterator, 2, init=False, expect_errors=True):
        assert "ValueError: predict_step(dataloader_iter): fully sharded" in str(error)


def test_a_limit_is_that_of_one_process(pool: WorkerPool) -> None:
    limit = {"limit_predict_batches": 2}
    expected, _ = pool.run(predict_limited, 1, "single", limit, init=False)[0]
    for found, _ in pool.run(predict_limited, 2, "fsdp", limit, init=False):
        assert_same(found, expected)


def predict_limited(strategy: str, limit: dict[str, int]) -> Any:
    module = Predicts()
    trainer = make_trainer(strategy, [], {} if strategy == "single" else {"share_predictions": True}, **limit)
    return trainer.predict(module, loader(13)), None


PADDED = [torch.zeros(2, 7), torch.zeros(2, 9)]
SQUARES = [[torch.full((2, 2), float(i)) for i in pair] for pair in ((0, 2), (1, 3))]


@pytest.mark.parametrize("parts", [PADDED, SQUARES, [1.0, 2.0], [pack_sequence([torch.zeros(2)] * 2)] * 2])
def test_what_cannot_be_told_apart_by_samples_is_listed_as_it_is(parts: list[Any]) -> None:
    replicas = [_Share([part], [2], 2) for part in parts]
    with pytest.warns(UserWarning, match="listed in turn"):
        assert all(one is other for one, other in zip(_of_one_process(replicas), parts, strict=True))


def test_texts_are_told_apart() -> None:
    replicas = [_Share([("a", "c")], [2], 2), _Share([("b",)], [1], 2)]
    assert _of_one_process(replicas) == [("a", "b"), ("c",)]


def test_what_has_no_rows_is_listed_and_warned_of(pool: WorkerPool) -> None:
    both = pool.run(predict, 2, "fsdp", {}, [12], mean=True, init=False)
    assert [len(found) for found, _ in both] == [4, 4]
    assert [float(mean) for mean in both[0][0]] == [float(mean) for mean in both[1][0]]
    assert both[0][1] and not both[1][1]


def test_nothing_is_returned_where_nothing_was_asked_for(pool: WorkerPool) -> None:
    for found, _ in pool.run(predict, 2, "sync", {}, [6], return_predictions=False, init=False):
        assert not found
