"""Metrics in replicas: one state, updated in the order of the samples."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel.threaded_replicas.data_parallel import DataParallel
from lightning_parallel.threaded_replicas.metrics import in_turn, metric_itself

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.all = CatMetric()
        self.several = MetricCollection({"mean": MeanMetric(), "again": CatMetric()})
        self.by_name = nn.ModuleDict({"accuracy": MulticlassAccuracy(3)})


@pytest.fixture
def parallel() -> Iterator[DataParallel]:
    opened = DataParallel([CPU] * 3)
    yield opened
    opened.close()


def test_updates_come_in_the_order_of_the_samples_whoever_is_first(parallel: DataParallel) -> None:
    net = Net()

    def step(replica: Any, share: Any) -> None:
        time.sleep(0.05 * (2 - replica.number))
        replica.module.all.update(share.batch)
        replica.module.several(share.batch)

    for _ in range(3):
        parallel.apply(net, step, torch.arange(7.0), stand_in=in_turn)
    assert net.all.compute().tolist() == [*map(float, range(7))] * 3
    assert net.several["again"].compute().tolist() == [*map(float, range(7))] * 3
    assert net.several.compute()["mean"] == 3


def test_a_metric_s_forward_returns_the_share_s_value(parallel: DataParallel) -> None:
    net = Net()
    values, _ = parallel.apply(
        net, lambda r, s: r.module.by_name["accuracy"](s.batch, s.batch), torch.arange(3), stand_in=in_turn
    )
    assert [float(value) for value in values] == [1, 1, 1]
    assert isinstance(values[0], Tensor)


def test_a_stand_in_is_taken_for_the_metric() -> None:
    waited = []
    metric, several = CatMetric(), MetricCollection({"mean": MeanMetric()})
    one, many = in_turn(metric, lambda: waited.append("one")), in_turn(several, lambda: waited.append("many"))
    assert isinstance(one, Metric) and isinstance(many, MetricCollection)
    assert metric_itself(one) is metric and metric_itself(several) is several
    assert not waited
    one.update(torch.ones(1))
    assert one.update_count == 1 and waited == ["one"] * 2
    assert len(many) == 1 and [*many] == ["mean"] and many["mean"] is several["mean"] and "many" in waited
    assert in_turn(nn.Linear(1, 1), lambda: None) is None
